"""The scheduler's rules, one by one. The fake device checks every K/V row that a step reads."""

from __future__ import annotations

import logging

import pytest

from jaxserve.engine.request import Status, StepPlan
from jaxserve.engine.waiting_queue import MAX_OVERTAKES
from jaxserve.errors import RequestError


def shape(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    """[(kind, seq_id, start, num_tokens)]"""
    return [("decode", r.seq.seq_id, r.start, r.num_tokens) for r in plan.decodes] + [
        ("prefill", r.seq.seq_id, r.start, r.num_tokens) for r in plan.prefills]


# -- one budget, decodes first


def test_decodes_come_first_and_prompts_are_chunked_to_what_is_left(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=20)
    loop.add(make_seq(0, 5))
    assert shape(loop.step()) == [("prefill", 0, 0, 5)]
    loop.add(make_seq(1, 30))
    # 19 tokens are left beside the decode row, that is 16 in blocks of 8.
    assert shape(loop.step()) == [("decode", 0, 5, 1), ("prefill", 1, 0, 16)]
    assert shape(loop.step()) == [("decode", 0, 6, 1), ("prefill", 1, 16, 14)]


def test_a_chunk_costs_its_length_rounded_up_to_a_block(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=24, page_size=16)
    loop.add(*[make_seq(i, 9) for i in range(3)])
    assert shape(loop.step()) == [("prefill", 0, 0, 9), ("prefill", 1, 0, 8)]


def test_prefill_goes_on_however_many_decode(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=8, max_num_seqs=8)
    loop.add(*[make_seq(i, 3, max_tokens=30) for i in range(8)])
    for i in range(8):
        assert ("prefill", i, 0, 3) in shape(loop.step())


def test_a_single_token_that_is_left_runs_as_a_decode_row(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(make_seq(0, 17))
    loop.step()
    assert shape(loop.step()) == [("decode", 0, 16, 1)]


def test_prompt_tokens_never_run_as_decode_rows_when_their_logprobs_are_asked(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(make_seq(0, 17, prompt_logprobs=2))
    loop.step()
    assert shape(loop.step()) == [("prefill", 0, 16, 1)]


def test_there_are_never_more_running_than_slots_and_the_lowest_slot_is_used(make_loop, make_seq):
    loop = make_loop(max_num_seqs=2)
    a, b, c = (make_seq(i, 3, max_tokens=9) for i in range(3))
    loop.add(a, b, c)
    loop.step()
    assert (a.slot, b.slot, c.slot) == (0, 1, -1)
    loop.scheduler.finish(a)
    loop.step()
    assert (b.slot, c.slot) == (1, 0)


# -- one step ahead


def test_the_next_step_is_planned_before_the_ids_are_known(make_loop, make_seq, solo_run):
    loop = make_loop()
    seq = make_seq(0, 3, max_tokens=3)
    loop.add(seq)
    scheduler, device = loop.scheduler, loop.device
    plans = [scheduler.schedule()]
    results = [device.launch(plans[0])]
    for _ in range(2):
        plans.append(scheduler.schedule())
        results.append(device.launch(plans[-1]))
    assert seq.num_sampled_in_flight == 3 and len(seq.token_ids) == 3
    assert scheduler.schedule() is None, "max_len is reached, counting what is in flight"
    assert seq.status is Status.RUNNING
    for plan, result in zip(plans, results):
        scheduler.commit(plan, result)
    assert seq.token_ids == solo_run(seq) and seq.status is Status.FINISHED


def test_what_a_row_computed_after_the_end_is_ignored(make_loop, make_seq, solo_run):
    loop = make_loop()
    ids = solo_run(make_seq(0, 3, max_tokens=20))
    seq = make_seq(0, 3, max_tokens=20, eos_ids=frozenset({ids[5]}))
    loop.add(seq)
    loop.run()
    assert seq.token_ids == ids[:6]


def test_commit_returns_the_new_ids_in_the_order_of_rows(make_loop, make_seq):
    loop = make_loop()
    seqs = [make_seq(i, 3) for i in range(3)]
    loop.add(*seqs)
    plan = loop.scheduler.schedule()
    assert loop.scheduler.commit(plan, {0: [10], 1: [11], 2: [12]}) == list(zip(seqs, ([10], [11], [12])))


def test_a_row_without_all_its_tokens_samples_nothing(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=8)
    loop.add(make_seq(0, 12))
    plan = loop.scheduler.schedule()
    assert not plan.rows[0].samples and loop.scheduler.commit(plan, {}) == []


# -- ends


@pytest.mark.parametrize("options", [dict(eos_ids=frozenset({7})), dict(stop_ids=frozenset({7})), dict(max_tokens=1)])
def test_reasons_of_the_end(make_loop, make_seq, options):
    loop = make_loop()
    seq = make_seq(0, 3, **options)
    loop.add(seq)
    plan = loop.scheduler.schedule()
    assert loop.scheduler.commit(plan, {0: [7]}) == [(seq, [7])]
    assert seq.status is Status.FINISHED


def test_min_tokens_come_before_any_eos(make_loop, make_seq):
    loop = make_loop()
    seq = make_seq(0, 3, max_tokens=9, min_tokens=2, eos_ids=frozenset({7}))
    loop.add(seq)
    for expected in (Status.RUNNING, Status.RUNNING, Status.FINISHED):
        loop.scheduler.commit(loop.scheduler.schedule(), {0: [7]})
        assert seq.status is expected


def test_generation_ends_at_max_model_len(make_loop, make_seq):
    loop = make_loop(max_model_len=20)
    seq = make_seq(0, 15, max_tokens=5)
    loop.add(seq)
    loop.run()
    assert len(seq.token_ids) == 20


def test_the_last_tokens_page_is_not_needed(make_loop, make_seq):
    """A token's K/V is written when the next one is computed; after the last there is no next."""
    loop = make_loop(num_pages=3, page_size=4, max_model_len=9)
    seq = make_seq(0, 5, max_tokens=4)
    loop.add(seq)
    loop.run()
    assert seq.status is Status.FINISHED and len(seq.token_ids) == 9


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "finished"])
def test_an_end_is_legal_in_every_state_and_idempotent(make_loop, make_seq, state):
    loop = make_loop(max_num_batched_tokens=8, num_pages=8)
    old, seq = make_seq(0, 8, max_tokens=20), make_seq(1, 12, max_tokens=8)
    steps = dict(waiting=0, prefill=2, decode=5, finished=60).get(state)
    loop.add(old, seq)
    if steps is None:
        while seq.status is not Status.PREEMPTED:
            loop.step()
    else:
        for _ in range(steps):
            loop.step()
    for _ in range(2):
        loop.scheduler.finish(seq)
        assert seq.status is Status.FINISHED
        loop.scheduler.check_invariants()
    loop.run()
    assert len(old.token_ids) == old.max_len and loop.scheduler.check_idle()


def test_a_late_result_does_not_touch_an_aborted_sequence(make_loop, make_seq):
    loop = make_loop()
    seq = make_seq(0, 3)
    loop.add(seq)
    loop.step()
    loop.scheduler.finish(seq)
    loop.drain()
    assert len(seq.token_ids) == seq.num_known == 3


# -- admission


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make_loop, make_seq):
    loop = make_loop(num_pages=5, page_size=4)
    with pytest.raises(RequestError, match="of up to 30 tokens need 8 KV pages of 4 tokens, but the pool has 4"):
        loop.add(make_seq(0, 10, max_tokens=20))
    loop.add(make_seq(1, 10, max_tokens=7))


def test_the_waiting_queue_is_bounded(make_loop, make_seq):
    loop = make_loop(max_waiting_requests=2)
    loop.add(make_seq(0, 3), make_seq(1, 3))
    assert loop.scheduler.queue_room == 0
    loop.step()
    assert loop.scheduler.queue_room == 2


@pytest.mark.parametrize("wrong", [
    dict(prompt=64), dict(prompt=60, max_tokens=5), dict(prompt=3, priority=1), dict(prompt=3, max_tokens=0)], ids=str)
def test_what_the_processor_should_have_refused(make_loop, make_seq, wrong):
    with pytest.raises(AssertionError):
        make_loop().add(make_seq(0, **wrong))


def test_lower_priority_values_run_first_and_ties_by_arrival(make_loop, make_seq):
    loop = make_loop(scheduling_policy="priority", max_num_seqs=1)
    seqs = [make_seq(i, 3, max_tokens=1, priority=p) for i, p in enumerate([1, 0, 1, -5, 0])]
    loop.add(*seqs)
    assert [seq.seq_id for plan in loop.run() for seq in plan.admitted] == [3, 1, 4, 0, 2]


def test_a_sequence_that_lacks_pages_does_not_block_smaller_ones(make_loop, make_seq):
    loop = make_loop(num_pages=11, page_size=4, max_model_len=40)
    loop.add(make_seq(0, 16, max_tokens=3), make_seq(1, 28), make_seq(2, 5))
    admitted = [seq.seq_id for plan in loop.run() for seq in plan.admitted]
    assert admitted == [0, 2, 1]


def test_nobody_is_overtaken_more_than_a_fixed_number_of_times(make_loop, make_seq):
    """A stream of small sequences keeps the pool busy; still the large one gets its turn."""
    loop = make_loop(num_pages=11, page_size=4, max_model_len=40)
    loop.add(make_seq(0, 12, max_tokens=8))
    loop.step()
    large = make_seq(1, 36, max_tokens=2)
    small = [make_seq(i, 5, max_tokens=6) for i in range(2, 60)]
    loop.add(large, *small)
    while large.status is Status.WAITING:
        loop.step()
    assert sum(seq.status is not Status.WAITING for seq in small) == MAX_OVERTAKES == large.overtaken
    loop.run()


def test_newcomers_leave_running_sequences_a_page_each_to_grow_into(make_loop, make_seq):
    loop = make_loop(num_pages=8, page_size=4)
    loop.add(make_seq(0, 12, max_tokens=5), make_seq(1, 16, max_tokens=2))
    plans = loop.run()
    assert [len(plan.admitted) for plan in plans if plan.admitted] == [1, 1], "7 pages hold both, but not for long"
    assert loop.scheduler.num_preemptions == 0


def test_a_chunked_prompt_keeps_the_pages_that_it_needs(make_loop, make_seq):
    loop = make_loop(num_pages=10, page_size=4, max_num_batched_tokens=16)
    loop.add(make_seq(0, 30, max_tokens=2), make_seq(1, 6, max_tokens=2))
    plans = loop.run()
    assert [len(plan.admitted) for plan in plans if plan.admitted] == [1, 1]
    assert loop.scheduler.num_preemptions == 0


# -- preemption


def test_the_youngest_is_preempted_and_comes_back_first(make_loop, make_seq, solo_run):
    loop = make_loop(num_pages=12, page_size=4, max_num_seqs=3)
    seqs = [make_seq(i, 9, max_tokens=12, seed=i) for i in range(4)]
    loop.add(*seqs)
    while not loop.scheduler.num_preemptions:
        plan = loop.step()
    assert seqs[2].status is Status.PREEMPTED and seqs[2].pages == [] and seqs[2].slot == -1
    assert not plan.admitted, "a step that preempts admits nobody"
    later = [seq.seq_id for plan in loop.run() for seq in plan.admitted]
    assert later.index(2) < later.index(3)
    assert [seq.token_ids for seq in seqs] == [solo_run(seq) for seq in seqs]


def test_the_least_important_is_preempted_whenever_it_came(make_loop, make_seq):
    loop = make_loop(num_pages=12, page_size=4, max_num_seqs=3, scheduling_policy="priority")
    seqs = [make_seq(i, 9, max_tokens=12, priority=p) for i, p in enumerate([2, 0, 1])]
    loop.add(*seqs)
    while not loop.scheduler.num_preemptions:
        loop.step()
    assert [seq.status for seq in seqs] == [Status.PREEMPTED, Status.RUNNING, Status.RUNNING]


def test_an_older_prompt_takes_back_the_page_of_a_younger_decode(make_loop, make_seq, solo_run):
    """The young one has its decode row in the plan already when the old one's chunk needs its page."""
    loop = make_loop(num_pages=19, page_size=4, max_num_batched_tokens=8, max_model_len=100)
    old, young = make_seq(0, 64, max_tokens=2), make_seq(1, 3, max_tokens=12)
    loop.add(young)
    young.arrival = 5
    loop.step()
    loop.add(old)
    while loop.has_work:
        plan = loop.step()
        if young.status is Status.PREEMPTED and plan:
            assert young not in [row.seq for row in plan.rows]
    assert loop.scheduler.num_preemptions
    assert young.token_ids == solo_run(young) and old.token_ids == solo_run(old)


def test_ids_sampled_before_a_preemption_are_kept(make_loop, make_seq, solo_run):
    loop = make_loop(num_pages=8, page_size=4)
    old, young = make_seq(0, 11, max_tokens=15), make_seq(1, 11, max_tokens=12)
    loop.add(old, young)
    while young.status is not Status.PREEMPTED:
        before = len(young.token_ids)
        loop.step()
    assert len(young.token_ids) == before + 1 and young.num_sampled_in_flight == 0
    loop.run()
    assert young.token_ids == solo_run(young)


def test_a_preempted_sequence_waits_for_its_ids_in_flight(make_loop, make_seq, solo_run):
    """With results two steps late, it could be admitted again before they are there. The device checks
    that the ids it is given are complete."""
    loop = make_loop(depth=2, num_pages=8, page_size=4)
    old, young = make_seq(0, 11, max_tokens=6), make_seq(1, 11, max_tokens=12)
    loop.add(old, young)
    loop.run()
    assert loop.scheduler.num_preemptions and young.token_ids == solo_run(young)


def test_a_preempted_sequence_may_end_by_the_id_that_was_in_flight(make_loop, make_seq):
    loop = make_loop(num_pages=8, page_size=4)
    old, young = make_seq(0, 11, max_tokens=15), make_seq(1, 11, max_tokens=12, eos_ids=frozenset({99}))
    loop.add(old, young)
    loop.step()
    loop.step()
    loop.in_flight[-1][1][young.seq_id] = [99]
    plan = loop.step()
    assert [row.seq for row in plan.rows] == [old] and loop.scheduler.num_preemptions == 1
    assert young.status is Status.FINISHED and loop.scheduler.num_waiting == 0
    loop.run()
    assert loop.scheduler.check_idle()


# -- prefix reuse


def test_equal_prompts_in_one_step_share_their_full_pages(make_loop, make_seq, solo_run):
    loop = make_loop(max_num_batched_tokens=64)
    seqs = [make_seq(i, list(range(18)), seed=i) for i in range(3)]
    loop.add(*seqs)
    assert shape(loop.step()) == [("prefill", 0, 0, 18), ("prefill", 1, 16, 2), ("prefill", 2, 16, 2)]
    assert seqs[0].pages[:4] == seqs[1].pages[:4] == seqs[2].pages[:4]
    assert [seq.num_cached_tokens for seq in seqs] == [0, 16, 16]
    loop.run()
    assert [seq.token_ids for seq in seqs] == [solo_run(seq) for seq in seqs]


def test_at_least_one_token_is_computed(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=64)
    prompt = list(range(16))
    loop.add(make_seq(0, prompt), make_seq(1, prompt))
    assert shape(loop.step()) == [("prefill", 0, 0, 16), ("prefill", 1, 12, 4)]


def test_generated_tokens_are_reused_by_the_next_turn_of_a_chat(make_loop, make_seq):
    loop = make_loop()
    first = make_seq(0, 6, max_tokens=8)
    loop.add(first)
    loop.run()
    second = make_seq(1, first.token_ids + [1, 2, 3])
    loop.add(second)
    loop.run()
    assert second.num_cached_tokens == 12, "of 14 tokens, 13 have K/V, in pages of 4"


def test_the_page_that_a_stop_token_completes_is_reused(make_loop, make_seq, solo_run):
    """The step that ran one ahead of the stop has written the stop token's K/V."""
    loop = make_loop()
    ids = solo_run(make_seq(0, 6, max_tokens=20))
    first = make_seq(0, 6, max_tokens=20, eos_ids=frozenset({ids[11]}))
    loop.add(first)
    loop.run()
    second = make_seq(1, first.token_ids + [1])
    loop.add(second)
    loop.run()
    assert len(first.token_ids) == second.num_cached_tokens == 12


def test_counters_count_tokens_and_no_recomputation(make_loop, make_seq):
    loop = make_loop(num_pages=9, page_size=4)
    loop.add(*[make_seq(i, [5] * 9, max_tokens=12, seed=i) for i in range(3)])
    loop.run()
    assert loop.scheduler.num_preemptions
    assert (loop.scheduler.pool.stats.query_tokens, loop.scheduler.pool.stats.hit_tokens) == (27, 16)


def test_a_cache_salt_isolates(make_loop, make_seq):
    loop = make_loop()
    prompt = list(range(13))
    seqs = [make_seq(i, prompt, cache_salt=salt) for i, salt in enumerate([None, "a", "b", "a"])]
    loop.add(*seqs)
    loop.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0, 12]


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(make_loop, make_seq):
    loop = make_loop(max_num_batched_tokens=64)
    prompt = list(range(13))
    seqs = [make_seq(i, prompt, prompt_logprobs=asked) for i, asked in enumerate([1, 1, None])]
    loop.add(*seqs)
    loop.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 12]
    assert loop.scheduler.pool.stats.query_tokens == 13


def test_a_switched_off_cache_is_not_used(make_loop, make_seq):
    loop = make_loop(enable_prefix_caching=False)
    seqs = [make_seq(i, [3] * 13) for i in range(2)]
    loop.add(*seqs)
    loop.run()
    assert seqs[1].num_cached_tokens == 0 and seqs[1].page_hashes == []


def test_nothing_older_than_a_reset_is_reused(make_loop, make_seq):
    """New parameters come with a reset. A sequence that runs through it goes on publishing nothing, since
    its later pages build on K/V of the old ones; the device would notice."""
    loop = make_loop(max_num_batched_tokens=16)
    running = make_seq(0, [4] * 40, max_tokens=12)
    loop.add(running)
    loop.step()
    loop.scheduler.reset_prefix_cache()
    loop.device.params += 1
    for _ in range(8):
        loop.step()
    later = [make_seq(i, running.token_ids) for i in (1, 2)]
    loop.add(*later)
    loop.run()
    assert [seq.num_cached_tokens > 0 for seq in later] == [False, True]
    assert running.status is Status.FINISHED


def test_after_a_reset_a_preempted_sequence_publishes_again(make_loop, make_seq):
    loop = make_loop(num_pages=9, page_size=4)
    old, young = make_seq(0, 11, max_tokens=12), make_seq(1, 11, max_tokens=12)
    loop.add(old, young)
    loop.step()
    loop.scheduler.reset_prefix_cache()
    while young.status is not Status.PREEMPTED:
        loop.step()
    assert not loop.scheduler.pool._page_of
    loop.run()
    follower = make_seq(2, young.token_ids)
    loop.add(follower)
    loop.run()
    assert follower.num_cached_tokens == 20


# -- several decode steps in one launch


def test_rows_get_several_tokens_when_nothing_else_is_to_do(make_loop, make_seq, solo_run):
    loop = make_loop(decode_steps=4)
    a, b = make_seq(0, 5, max_tokens=10), make_seq(1, 5, max_tokens=4)
    loop.add(a, b)
    plans = loop.run()
    assert [shape(plan) for plan in plans[1:]] == [
        [("decode", 0, 5, 4), ("decode", 1, 5, 3)], [("decode", 0, 9, 4)], [("decode", 0, 13, 1)]]
    assert [plan.decode_steps for plan in plans] == [1, 4, 4, 1], "one token is left for the last"
    assert [a.token_ids, b.token_ids] == [solo_run(a), solo_run(b)]


def test_a_prompt_makes_the_launch_a_single_step(make_loop, make_seq):
    loop = make_loop(decode_steps=4)
    loop.add(make_seq(0, 5, max_tokens=10))
    loop.step()
    loop.add(make_seq(1, 5))
    plan = loop.step()
    assert plan.decode_steps == 1 and shape(plan) == [("decode", 0, 5, 1), ("prefill", 1, 0, 5)]


def test_ids_after_a_stop_inside_a_launch_are_dropped(make_loop, make_seq):
    loop = make_loop(decode_steps=4)
    seq = make_seq(0, 5, max_tokens=10, stop_ids=frozenset({9}))
    loop.add(seq)
    loop.scheduler.commit(loop.scheduler.schedule(), {0: [1]})
    assert loop.scheduler.commit(loop.scheduler.schedule(), {0: [2, 9, 3, 4]}) == [(seq, [2, 9])]
    assert seq.token_ids[5:] == [1, 2, 9] and seq.status is Status.FINISHED


def test_a_row_that_fails_on_the_way_brings_what_it_has(make_loop, make_seq):
    loop = make_loop(decode_steps=4)
    a, b = make_seq(0, 5, max_tokens=10), make_seq(1, 5, max_tokens=10)
    loop.add(a, b)
    loop.scheduler.commit(loop.scheduler.schedule(), {0: [1], 1: [1]})
    assert loop.scheduler.commit(loop.scheduler.schedule(), {0: [2, 3], 1: []}) == [(a, [2, 3])]
    assert a.num_sampled_in_flight == b.num_sampled_in_flight == 0
    loop.scheduler.finish(a)
    loop.scheduler.finish(b)
    assert loop.scheduler.check_idle()


def test_ids_beyond_a_rows_own_number_are_ignored(make_loop, make_seq):
    """The device runs all rows for decode_steps; one that has fewer pages brings ids of no worth."""
    loop = make_loop(decode_steps=4, num_pages=6, page_size=4)
    a, b = make_seq(0, 7, max_tokens=5), make_seq(1, 6, max_tokens=6)
    loop.add(a, b)
    loop.scheduler.commit(loop.scheduler.schedule(), {0: [1], 1: [1]})
    plan = loop.scheduler.schedule()
    assert [row.num_tokens for row in plan.rows] == [4, 2]
    assert loop.scheduler.commit(plan, {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]}) == [(a, [2, 3, 4, 5]), (b, [2, 3])]
    assert b.num_sampled_in_flight == 0 and len(b.token_ids) == 9


def test_when_pages_are_short_rows_get_fewer_tokens_and_nobody_is_preempted(make_loop, make_seq):
    loop = make_loop(decode_steps=4, num_pages=6, page_size=4)
    loop.add(make_seq(0, 7, max_tokens=5), make_seq(1, 6, max_tokens=3))
    plans = loop.run()
    assert shape(plans[1]) == [("decode", 0, 7, 4), ("decode", 1, 6, 2)]
    loop.add(make_seq(2, 7, max_tokens=5), make_seq(3, 6, max_tokens=6))
    plans = loop.run()
    assert shape(plans[1]) == [("decode", 2, 7, 4), ("decode", 3, 6, 2)], "one free page, for the first"
    assert loop.scheduler.num_preemptions == 0


# -- deterministic mode


def test_after_a_preemption_generated_tokens_are_replayed_one_by_one(make_loop, make_seq, solo_run):
    loop = make_loop(deterministic=True, num_pages=8, page_size=4)
    old, young = make_seq(0, 11, max_tokens=12), make_seq(1, 9, max_tokens=14)
    loop.add(old, young)
    while young.status is not Status.PREEMPTED:
        loop.step()
    generated = len(young.token_ids) - 9
    rows = [row for plan in loop.run() for row in plan.rows if row.seq is young]
    assert rows[0].num_tokens == 9 and not rows[0].samples
    replay = rows[1:1 + generated]
    assert [(row.start, row.num_tokens) for row in replay] == [(9 + i, 1) for i in range(generated)]
    assert [row.samples for row in replay] == [False] * (generated - 1) + [True]
    assert young.token_ids == solo_run(young) and old.token_ids == solo_run(old)


def test_deterministic_prompts_are_prefilled_to_the_last_token(make_loop, make_seq):
    loop = make_loop(deterministic=True, max_num_batched_tokens=16)
    loop.add(make_seq(0, 17))
    loop.step()
    assert shape(loop.step()) == [("prefill", 0, 16, 1)]


def test_deterministic_hits_end_where_a_block_does_and_hold_prompt_tokens_only(make_loop, make_seq):
    loop = make_loop(deterministic=True)
    first = make_seq(0, 14, max_tokens=12)
    loop.add(first)
    loop.run()
    second = make_seq(1, first.token_ids)
    loop.add(second)
    loop.run()
    assert second.num_cached_tokens == 8, "12 prompt tokens are in full pages of 4; blocks have 8"


# -- faults


def test_after_a_lost_pool_all_run_again_and_late_results_are_void(make_loop, make_seq, solo_run):
    loop = make_loop()
    seqs = [make_seq(i, 9, max_tokens=8) for i in range(6)]
    loop.add(*seqs)
    for _ in range(4):
        loop.step()
    loop.device.lose_pool()
    loop.scheduler.requeue_all()
    for _, sampled in loop.in_flight:
        sampled.update({seq_id: [-1] for seq_id in sampled})
    assert loop.scheduler.num_running == 0 and not loop.scheduler.pool._page_of
    assert [seq.seq_id for plan in loop.run() for seq in plan.admitted] == list(range(6))
    assert [seq.token_ids for seq in seqs] == [solo_run(seq) for seq in seqs]


def test_fail_all_ends_everything_and_the_engine_goes_on(make_loop, make_seq, solo_run):
    loop = make_loop()
    seqs = [make_seq(i, 9) for i in range(6)]
    loop.add(*seqs)
    loop.step()
    loop.scheduler.fail_all()
    assert {seq.status for seq in seqs} == {Status.FINISHED} and not loop.has_work
    loop.device.lose_pool()
    late = make_seq(9, seqs[0].token_ids)
    loop.add(late)
    loop.run()
    assert late.token_ids == solo_run(late) and late.num_cached_tokens == 0


def test_an_inconsistent_idle_scheduler_is_logged_and_rebuilt(make_loop, make_seq, caplog):
    loop = make_loop()
    loop.scheduler.pool.allocate(3)
    with caplog.at_level(logging.ERROR):
        assert not loop.scheduler.check_idle()
    assert "inconsistent" in caplog.text and loop.scheduler.check_idle()
    loop.add(make_seq(0, 5))
    loop.run()
