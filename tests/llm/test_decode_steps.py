"""Several decode steps in one launch give what single ones give."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import EngineError, SamplingParams
from tests.llm import tiny
from tests.llm.tiny import prompt_ids

PROMPTS = [prompt_ids(n, seed=n) for n in (1, 9, 33, 70, 8)]


@pytest.fixture(scope="module")
def llm4(make_llm):
    with make_llm(decode_steps=4) as llm:
        yield llm


def both(llm, llm4, prompts, params) -> None:
    """Asserts that all but the timings and names is equal."""
    one, four = (engine.generate(prompts, params, use_tqdm=False) for engine in (llm, llm4))
    for a, b in zip(one, four, strict=True):
        assert len(a.outputs) == len(b.outputs)
        for x, y in zip(a.outputs, b.outputs):
            assert (x.token_ids, x.text, x.finish_reason, x.stop_reason) == (
                y.token_ids, y.text, y.finish_reason, y.stop_reason)
            if x.logprobs is not None:
                assert y.cumulative_logprob == pytest.approx(x.cumulative_logprob, abs=1e-4)
                for p, q in zip(x.logprobs, y.logprobs, strict=True):
                    assert list(p) == list(q)
                    assert [e.logprob for e in p.values()] == pytest.approx([e.logprob for e in q.values()], abs=1e-4)


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 3}, {"seed": 4, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7}, {"seed": 5, "n": 3},
    {"temperature": 0, "logprobs": 3}, {"seed": 6, "logprobs": 2, "prompt_logprobs": 1, "min_tokens": 5},
], ids=str)
def test_equal(llm, llm4, options):
    both(llm, llm4, PROMPTS, SamplingParams(max_tokens=13, **options))


def test_lengths_that_are_no_multiple(llm, llm4):
    both(llm, llm4, PROMPTS, [SamplingParams(seed=i, max_tokens=n, ignore_eos=True)
                              for i, n in enumerate((1, 2, 5, 8, 11))])


def test_ends_in_the_middle_of_a_launch(llm, llm4, dense):
    prompt = PROMPTS[1]
    ids = dense.greedy(prompt, 12)
    for at in range(1, 7):
        both(llm, llm4, [prompt, PROMPTS[2]], [
            SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ids[at]]),
            SamplingParams(temperature=0, max_tokens=12, min_tokens=at, stop_token_ids=[ids[0]])])
    text = tiny.tokenizer().decode(ids)
    both(llm, llm4, [prompt], SamplingParams(temperature=0, max_tokens=12, stop=[text[2:4], text[5:]]))


def test_a_fault_counts_only_before_the_end(make_llm):
    """The last of a launch's steps may have run beyond the end of the text."""
    tensors = tiny.parrot_tensors([*b"abc", tiny.EOS])
    tensors["model.embed_tokens.weight"][tiny.EOS] = np.nan
    params = SamplingParams(temperature=0, max_tokens=20)
    with make_llm(params=tensors, decode_steps=4) as llm:
        [output] = llm.generate(["a"], params, use_tqdm=False)
        assert output.error is None and (output.text, output.outputs[0].finish_reason) == ("bc", "stop")
        [output] = llm.generate(["a"], params.clone(ignore_eos=True), use_tqdm=False)
        assert isinstance(output.error, EngineError) and "not finite" in str(output.error)
        assert output.outputs[0].token_ids == [*b"bc", tiny.EOS]
        assert llm.metrics()["not_finite"] == 1


def test_pages_shorter_than_a_launch(llm, llm4):
    before = llm4.metrics()["preemptions"]
    both(llm, llm4, [prompt_ids(60, seed=s) for s in range(3)], SamplingParams(seed=1, max_tokens=60, ignore_eos=True))
    metrics = llm4.metrics()
    assert metrics["preemptions"] > before
    assert metrics["pages_free"] == metrics["pages_total"]


def test_there_are_fewer_launches(llm4):
    before = llm4.metrics()["steps"]
    llm4.generate(prompt_ids(5), temperature=0, max_tokens=41, ignore_eos=True, use_tqdm=False)
    assert llm4.metrics()["steps"] - before == 1 + 10
