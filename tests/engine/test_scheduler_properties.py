"""Whatever happens to requests, each finishes with the ids it has alone, and nothing leaks."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxserve.engine.request import Status
from jaxserve.engine.waiting_queue import MAX_OVERTAKES
from jaxserve.errors import QueueFullError, RequestError

SHARED_PREFIXES = [[1] * 40, [2, 3] * 20, [1] * 8 + [4] * 32]


@st.composite
def configs(draw):
    page_size = draw(st.sampled_from([2, 4]))
    options = dict(
        page_size=page_size, max_model_len=draw(st.integers(24, 48)), num_pages=draw(st.integers(60, 120)) // page_size,
        max_num_seqs=draw(st.integers(1, 8)), query_block=draw(st.sampled_from([1, 4, 8])),
        max_waiting_requests=draw(st.sampled_from([3, 30])),
        enable_prefix_caching=draw(st.integers(0, 3)) > 0, deterministic=draw(st.booleans()))
    options["max_num_batched_tokens"] = options["query_block"] + draw(st.integers(0, 30))
    options["scheduling_policy"] = draw(st.sampled_from(["fcfs", "priority"]))
    options["decode_steps"] = 1 if options["deterministic"] else draw(st.sampled_from([1, 1, 3]))
    return options


prompts = st.builds(lambda prefix, shared, own: prefix[:shared] + own, st.sampled_from(SHARED_PREFIXES),
                    st.integers(0, 24), st.lists(st.integers(0, 9), min_size=1, max_size=6))
token_sets = st.sampled_from([frozenset(), frozenset(), frozenset(range(3)), frozenset(range(2, 50, 7))])
options = st.fixed_dictionaries(dict(
    max_tokens=st.integers(1, 30), min_tokens=st.integers(0, 3), eos_ids=token_sets, stop_ids=token_sets,
    seed=st.integers(0, 1), priority=st.sampled_from([0, 0, -1, 2]),
    cache_salt=st.sampled_from([None, None, "a"]), prompt_logprobs=st.sampled_from([None, None, None, 1])))


class Requests(RuleBasedStateMachine):
    def __init__(self, make_loop, make_seq, solo_run):
        super().__init__()
        self.make_loop, self.make_seq, self.solo_run = make_loop, make_seq, solo_run
        self.seqs, self.ended_early, self.overtaken = [], set(), Counter()

    @initialize(config=configs())
    def start(self, config):
        self.config = config
        self.loop = self.make_loop(**config)
        self.scheduler = self.loop.scheduler

    @rule(requests=st.lists(st.tuples(prompts, options, st.sampled_from([1, 1, 3])), min_size=1, max_size=6))
    def arrive(self, requests):
        for prompt, options, n in requests:
            for index in range(n):
                self.add(prompt, options | {"seed": 10 * options["seed"] + index})

    def add(self, prompt, options):
        config = self.config
        if config["scheduling_policy"] != "priority":
            options = options | {"priority": 0}
        seq = self.make_seq(len(self.seqs), prompt, **options)
        try:
            self.scheduler.add(seq)
        except RequestError:
            pages = -(-(min(seq.max_len, config["max_model_len"]) - 1) // config["page_size"])
            assert pages >= config["num_pages"] or seq.prompt_len >= config["max_model_len"]
        except QueueFullError:
            assert self.scheduler.num_waiting >= config["max_waiting_requests"]
        else:
            self.seqs.append(seq)

    @rule(times=st.integers(1, 12), commit_before_launch=st.booleans())
    def run_steps(self, times, commit_before_launch):
        for _ in range(times):
            self.step(commit_before_launch)

    def step(self, commit_before_launch=False):
        scheduler = self.scheduler
        waiting = [seq for seq in self.seqs if seq.status is Status.WAITING]
        preemptions = scheduler.num_preemptions
        plan = self.loop.step(commit_before_launch)
        if plan is None:
            return
        self.check_budget(plan)
        if scheduler.num_preemptions > preemptions:
            assert not plan.admitted, "a step that preempts admits nobody"
        for position, seq in enumerate(waiting):
            if seq.status is Status.WAITING:
                passed_by = [other for other in waiting[position + 1:] if other in plan.admitted
                             and other.options.priority >= seq.options.priority]
                self.overtaken[seq] += len(passed_by)
                assert self.overtaken[seq] <= MAX_OVERTAKES

    def check_budget(self, plan):
        config, block = self.config, self.config["query_block"]
        costs = [-(-row.num_tokens // block) * block for row in plan.prefills]
        assert len(plan.decodes) + len(plan.prefills) <= config["max_num_seqs"]
        assert sum(costs) <= max(block, config["max_num_batched_tokens"] - len(plan.decodes))
        assert plan.decode_steps == 1 or not plan.prefills
        for row in plan.decodes:
            in_prompt = row.start < row.seq.prompt_len
            assert not in_prompt or (not config["deterministic"] and row.seq.options.prompt_logprobs is None)
            assert 1 <= row.num_tokens <= plan.decode_steps
        for row in plan.prefills:
            end = row.start + row.num_tokens
            assert row.num_tokens % block == 0 or row.samples or (
                config["deterministic"] and end == row.seq.prompt_len), "a chunk with waste in its middle"
            assert not config["deterministic"] or end <= row.seq.prompt_len

    @rule(pick=st.integers(0, 1000), stop=st.booleans())
    def end_one(self, pick, stop):
        """An abort, which may hit any state, or a stop string in the text so far."""
        if not self.seqs:
            return
        seq = self.seqs[pick % len(self.seqs)]
        ended = seq.status is Status.FINISHED
        if stop:
            self.scheduler.finish(seq, "stop", "END")
        else:
            assert self.scheduler.abort(seq.seq_id) is (None if ended else seq)
        if not ended:
            self.ended_early.add(seq)
            assert seq.finish_reason == ("stop" if stop else "abort")

    @rule(event=st.sampled_from(["drain"] * 4 + ["new parameters"] * 3 + ["pool lost"] * 2 + ["all fail"]))
    def something_rare(self, event):
        if event == "drain":
            self.loop.drain()
        elif event == "new parameters":
            self.scheduler.reset_prefix_cache()
            self.loop.device.params += 1
        else:
            self.lose_pool(event == "all fail")

    def lose_pool(self, all_fail):
        self.loop.device.lose_pool()
        if all_fail:
            self.ended_early.update(self.scheduler.fail_all())
            assert not self.scheduler.has_work
        else:
            self.scheduler.requeue_all()
        if self.loop.outstanding:  # what was computed is garbage, and must be ignored
            plan, sampled = self.loop.outstanding
            self.loop.outstanding = plan, {seq_id: [-1] * len(ids) for seq_id, ids in sampled.items()}

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.scheduler.has_work and not self.loop.outstanding:
                break
            self.step()
        assert self.scheduler.check_idle() and self.scheduler.pool.num_used == 0
        for seq in self.seqs:
            assert seq.status is Status.FINISHED
            ids, reason, stop_reason = self.solo_run(seq)
            if seq in self.ended_early:
                assert seq.token_ids == ids[:len(seq.token_ids)]
            else:
                assert (seq.token_ids, seq.finish_reason, seq.stop_reason) == (ids, reason, stop_reason)


def test_any_history_of_requests_ends_with_the_ids_of_solo_runs(make_loop, make_seq, solo_run):
    run_state_machine_as_test(lambda: Requests(make_loop, make_seq, solo_run),
                              settings=settings(max_examples=300, stateful_step_count=30))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tight_pool_preempts_and_still_gives_the_ids_of_solo_runs(make_loop, make_seq, solo_run, deterministic):
    """The same with conditions under which preemption is certain, so that it is not left to chance."""
    loop = make_loop(num_pages=12, max_num_seqs=6, deterministic=deterministic, max_model_len=40)
    seqs = [make_seq(i, [1] * (i % 3) + [i] * 6, max_tokens=30, seed=i) for i in range(12)]
    loop.add(*seqs)
    loop.run()
    assert loop.scheduler.num_preemptions > 10
    assert loop.scheduler.check_idle()
    for seq in seqs:
        assert (seq.token_ids, seq.finish_reason, seq.stop_reason) == solo_run(seq)
