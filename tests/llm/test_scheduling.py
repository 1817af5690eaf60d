"""The schedule as callers see it: shared pages, preemption, priorities, queue bounds and aborts."""

from __future__ import annotations

import queue
import random

import pytest

from jaxserve import QueueFullError, RequestError, RequestOutput, SamplingParams
from tests.llm.tiny import prompt_ids


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def all_pages_free(llm) -> bool:
    metrics = llm.metrics()
    return metrics["pages_free"] == metrics["pages_total"] and metrics["running"] == metrics["waiting"] == 0


def test_completions_of_one_prompt_share_its_pages(llm):
    llm.reset_prefix_cache()
    before = llm.metrics()["prefix_hit_tokens"]
    [output] = llm.generate(prompt_ids(60), greedy(4, n=3), use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 1
    assert llm.metrics()["prefix_hit_tokens"] - before == 2 * 56
    assert output.num_cached_tokens == 0


def test_a_cache_salt_isolates(llm):
    llm.reset_prefix_cache()

    def cached(salt: str | None) -> int:
        return llm.generate(prompt_ids(40), greedy(1, cache_salt=salt), use_tqdm=False)[0].num_cached_tokens

    assert [cached(salt) for salt in ("a", "a", "b", None, "b", None)] == [0, 32, 0, 0, 32, 32]


def test_preemption_changes_nothing(llm):
    # 360 tokens in 216 places.
    prompts = [prompt_ids(60, seed=seed) for seed in range(3)]
    params = [greedy(60), SamplingParams(max_tokens=60, seed=3, ignore_eos=True),
              SamplingParams(max_tokens=60, seed=4, top_p=0.9, frequency_penalty=0.5, ignore_eos=True)]
    alone = [llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params)]
    llm.reset_prefix_cache()
    before = llm.metrics()["preemptions"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert llm.metrics()["preemptions"] > before
    assert together == alone
    assert all_pages_free(llm)


def test_the_more_important_request_starts_first(make_llm):
    with make_llm(scheduling_policy="priority") as llm:
        # Three slots, which get free one after the other.
        params = [greedy(count) for count in (5, 10, 15)] + [greedy(20, priority=p) for p in (5, -1, 0)]
        outputs = llm.generate([prompt_ids(4, seed=i) for i in range(6)], params, use_tqdm=False)
        late, first, second = (output.timings.queue for output in outputs[3:])
        assert first < second < late


def test_priorities_need_their_policy(llm):
    with pytest.raises(RequestError, match="scheduling_policy"):
        llm.generate([1], greedy(1, priority=1), use_tqdm=False)


def test_the_waiting_queue_is_bounded_for_streams(make_llm):
    with make_llm(max_waiting_requests=2) as llm:
        # In the engine's thread, so that no step comes in between.
        streams = llm._thread.call(lambda: [llm.stream([i], greedy(2)) for i in range(4)])
        for stream in streams[2:]:
            with pytest.raises(QueueFullError, match="max_waiting_requests=2"):
                next(stream)
        assert [len(list(stream)) for stream in streams[:2]] == [2, 2]


def test_a_list_of_any_length_passes_a_bounded_queue(make_llm):
    with make_llm(max_waiting_requests=2) as llm:
        outputs = llm.generate([[i] for i in range(20)], greedy(2), use_tqdm=False)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        [output] = llm.generate([[1]], greedy(1, n=3), use_tqdm=False)
        assert "n=3" in str(output.error) and "max_waiting_requests" in str(output.error)


def submit(llm, requests: list[tuple[SamplingParams, bool]]) -> queue.SimpleQueue[tuple[int, RequestOutput]]:
    """Requests of (options, patient), all before the next step. The result gets indices and outputs as they end."""
    ended: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()

    def listener(index: int):
        return lambda event: ended.put((index, event.output)) if event.output else None

    def submit_all() -> None:
        for i, (params, patient) in enumerate(requests):
            llm.submit(llm._processor.process([i], params), listener(i), patient=patient)

    llm._thread.call(submit_all)
    return ended


def test_an_urgent_request_does_not_wait_behind_a_long_list(make_llm):
    with make_llm(max_waiting_requests=2, max_num_seqs=1, scheduling_policy="priority") as llm:
        ended = submit(llm, [*[(greedy(2), True)] * 6, (greedy(2, priority=-1), True)])
        assert [ended.get(timeout=60)[0] for _ in range(7)] == [0, 6, 1, 2, 3, 4, 5]


def test_what_others_wait_for_is_no_reason_to_refuse_what_fits(make_llm):
    """Three completions need more room than there is; a single one has it."""
    with make_llm(max_waiting_requests=3, max_num_seqs=1) as llm:
        ended = submit(llm, [(greedy(2), True), (greedy(2, n=3), True), (greedy(2), False), (greedy(2, n=2), False)])
        outputs = dict(ended.get(timeout=60) for _ in range(4))
        assert [outputs[i].error for i in range(3)] == [None] * 3
        assert isinstance(outputs[3].error, QueueFullError) and "room for 1 of 2 sequences" in str(outputs[3].error)


def test_what_can_never_fit_is_refused(make_llm):
    with make_llm(num_pages=8) as llm:
        with pytest.raises(RequestError, match=r"need 8 KV pages of 8 tokens, but the pool has 7"):
            llm.generate(prompt_ids(50), greedy(8), use_tqdm=False)
        with pytest.raises(RequestError, match="num_pages"):  # max_tokens: the rest of the context
            llm.generate(prompt_ids(4), SamplingParams(), use_tqdm=False)
        assert all_pages_free(llm)


def test_aborts_at_any_time_disturb_nobody(llm):
    rng = random.Random(0)
    prompts = [prompt_ids(rng.choice((3, 20, 70)), seed=i) for i in range(24)]
    params = [SamplingParams(max_tokens=24, seed=i, ignore_eos=True) for i in range(24)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    streams = [llm.stream(prompt, p) for prompt, p in zip(prompts, params)]
    # Some before they start, some in their prompt, some while they generate, and some twice.
    survivors = []
    for i, stream in enumerate(streams):
        if i % 2:
            survivors.append(i)
            continue
        for _ in range(rng.choice((0, 0, 1, 9))):
            next(stream)
        stream.close()
        stream.close()
    for i in survivors:
        last = list(streams[i])[-1]
        assert last.output.outputs[0].token_ids == expected[i]
    del streams, stream
    assert all_pages_free(llm)
