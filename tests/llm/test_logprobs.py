"""Log-probabilities are those of the raw logits, against a dense reference."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import RequestError, SamplingParams
from tests.llm.tiny import prompt_ids

CHUNKED = prompt_ids(100)  # the token budget is 64


def check(entries, token: int, expected: np.ndarray, k: int) -> None:
    """One position's entries: the k best in order, and `token`; values within 1e-4."""
    order = np.argsort(-expected, kind="stable")
    ids = list(entries)
    assert ids[:k] == order[:k].tolist()
    assert ids[k:] == ([] if token in ids[:k] else [token])
    for token_id, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-4)
        assert entry.rank == 1 + int((expected > expected[token_id]).sum())


def check_completion(dense, prompt, completion, k: int) -> None:
    expected = dense.logprobs(prompt + completion.token_ids)[len(prompt) - 1:]
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entries, row in zip(completion.token_ids, completion.logprobs, expected):
        check(entries, token, row, k)
    total = sum(entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)


def check_prompt(dense, prompt, output, k: int) -> None:
    assert output.prompt_logprobs[0] is None
    for entries, token, row in zip(output.prompt_logprobs[1:], prompt[1:], dense.logprobs(prompt), strict=False):
        check(entries, token, row, k)
    assert len(output.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True),
    # Flat, so that tokens come from outside the best; the logprobs do not know the temperature, nor the mask.
    SamplingParams(temperature=3, seed=1, max_tokens=8, logprobs=2, ignore_eos=True),
    SamplingParams(allowed_token_ids=[9], max_tokens=3, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True),
], ids=["greedy", "sampled", "masked", "only-the-sampled"])
def test_of_generated_tokens(llm, dense, params):
    prompt = prompt_ids(11)
    # Beside requests that ask for none, and for others.
    others = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, logprobs=20)]
    output, silent, _ = llm.generate([prompt, prompt_ids(5), prompt_ids(6)], [params, *others], use_tqdm=False)
    check_completion(dense, prompt, output.outputs[0], params.logprobs)
    assert silent.outputs[0].logprobs is None and silent.outputs[0].cumulative_logprob is None


def test_of_prompts(llm, dense):
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time after the prompt's pages are in the prefix cache, where nothing may be skipped
        [output] = llm.generate(CHUNKED, params, use_tqdm=False)
        check_prompt(dense, CHUNKED, output, 3)
        check_completion(dense, CHUNKED, output.outputs[0], 3)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 32, 33, 64, 65])
def test_of_prompts_at_the_edges_of_chunks(llm, dense, length):
    prompt = prompt_ids(length, seed=length)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output, _ = llm.generate([prompt, prompt_ids(60)], [params, SamplingParams(max_tokens=20)], use_tqdm=False)
    check_prompt(dense, prompt, output, 0)


def test_of_several_completions(llm, dense):
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [output] = llm.generate(CHUNKED, params, use_tqdm=False)
    check_prompt(dense, CHUNKED, output, 1)
    for completion in output.outputs:
        check_completion(dense, CHUNKED, completion, 2)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_of_the_prompt_come_with_the_first_event(llm, max_tokens):
    events = list(llm.stream(CHUNKED, n=2, seed=1, max_tokens=max_tokens, prompt_logprobs=1, ignore_eos=True))
    assert events[0].prompt_logprobs == events[-1].output.prompt_logprobs
    assert all(event.prompt_logprobs is None for event in events[1:])


def test_through_preemption(llm, dense):
    prompts = [prompt_ids(60, seed=seed) for seed in range(3)]
    params = SamplingParams(seed=1, max_tokens=60, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    before = llm.metrics()["preemptions"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.metrics()["preemptions"] > before
    for prompt, output in zip(prompts, outputs):
        check_prompt(dense, prompt, output, 1)
        check_completion(dense, prompt, output.outputs[0], 1)


def test_scoring_generates_nothing(llm, dense):
    [output] = llm.generate(CHUNKED, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    check_prompt(dense, CHUNKED, output, 1)
    [completion] = output.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")


def test_a_stream_carries_them_with_its_tokens(llm, dense):
    prompt = prompt_ids(7)
    events = list(llm.stream(prompt, temperature=0, max_tokens=6, logprobs=2, ignore_eos=True))
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)
    joined = [entries for event in events for entries in event.logprobs]
    assert joined == events[-1].output.outputs[0].logprobs
    check_completion(dense, prompt, events[-1].output.outputs[0], 2)


def test_they_name_the_tokens_text(parrot):
    [output] = parrot.generate("a", max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=0, use_tqdm=False)
    [(token, entry)] = output.outputs[0].logprobs[0].items()
    assert (token, entry.decoded) == (ord("b"), "b")


def test_more_than_the_engine_allows(llm):
    with pytest.raises(RequestError, match="at most 20"):
        llm.generate([1], logprobs=21, use_tqdm=False)
