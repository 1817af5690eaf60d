"""deterministic=True: ids and log-probabilities are equal bit by bit, whatever runs beside a request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.llm import tiny
from tests.llm.tiny import prompt_ids

# Around pages (8 tokens) and blocks of prefill rows (32); some come in two chunks.
LENGTHS = (1, 7, 8, 9, 31, 32, 33, 40, 63, 64, 65, 72, 96, 97, 100, 110)


def requests(lengths=LENGTHS, max_tokens: int = 12):
    """Prompts and params; greedy and sampled, with different options, alternate."""
    options = ({"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 9, "top_p": 0.9}, {"temperature": 0},
               {"seed": 3, "repetition_penalty": 1.2}, {"temperature": 0, "prompt_logprobs": 2})
    return [(prompt_ids(n, seed=n), SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=4,
                                                   **options[i % len(options)])) for i, n in enumerate(lengths)]


def bits(output) -> tuple:
    """Everything that the model computed for a request, floats as their bits."""
    def of(positions):
        return [None if p is None else [(token, np.float32(e.logprob).tobytes()) for token, e in p.items()]
                for p in positions or ()]

    [completion] = output.outputs
    return completion.token_ids, of(completion.logprobs), of(output.prompt_logprobs)


def run(llm, pairs) -> list[tuple]:
    return [bits(output) for output in llm.generate(*map(list, zip(*pairs)), use_tqdm=False)]


def check(llm, pairs) -> None:
    """Alone, together, in other orders, with and without prefix hits."""
    alone = []
    for pair in pairs:
        llm.reset_prefix_cache()
        alone += run(llm, [pair])
    llm.reset_prefix_cache()
    assert run(llm, pairs) == alone
    for seed in range(3):
        order = list(range(len(pairs)))
        random.Random(seed).shuffle(order)
        if seed == 1:
            llm.reset_prefix_cache()
        assert run(llm, [pairs[i] for i in order]) == [alone[i] for i in order]
    hits = llm.metrics()["prefix_hit_tokens"]
    for pair, expected in zip(pairs, alone):
        for _ in range(2):
            assert run(llm, [pair]) == [expected]
    assert llm.metrics()["prefix_hit_tokens"] > hits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def deterministic(make_llm, request):
    with make_llm(deterministic=True, dtype=request.param, max_num_batched_tokens=128) as llm:
        yield llm


def test_batches_orders_and_prefix_hits(deterministic):
    check(deterministic, requests())


def test_preemption(deterministic):
    pairs = requests((60, 57, 64), max_tokens=60)
    alone = [run(deterministic, [pair])[0] for pair in pairs]
    for clear in (True, False):
        if clear:
            deterministic.reset_prefix_cache()
        before = deterministic.metrics()["preemptions"]
        assert run(deterministic, pairs) == alone
        assert deterministic.metrics()["preemptions"] > before


def test_completions_of_one_prompt(deterministic):
    params = SamplingParams(seed=9, max_tokens=8, logprobs=2, ignore_eos=True)
    [three] = deterministic.generate(prompt_ids(50), params.clone(n=3), use_tqdm=False)
    [one] = deterministic.generate(prompt_ids(50), params, use_tqdm=False)
    assert one.outputs[0] == three.outputs[0]


def test_two_programs_do_everything(deterministic):
    deterministic.generate(*map(list, zip(*requests())), use_tqdm=False)
    assert deterministic.metrics()["executables"] == 2 + 1  # and the upload of a slot


@pytest.mark.slow
def test_sliding_window(xla_cache):
    """Where such a layer's context begins depends on the block of rows that a token is in."""
    config = tiny.CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    options = tiny.ENGINE | {"deterministic": True, "max_num_batched_tokens": 128, "compilation_cache_dir": xla_cache}
    with LLM(config=config, params=tiny.random_tensors(), tokenizer=tiny.tokenizer(), **options) as llm:
        check(llm, requests())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_model(dtype):
    lengths = (1, 5, 31, 32, 33, 64, 100, 128, 200, 257, 300)
    with LLM("demo", deterministic=True, dtype=dtype, max_num_batched_tokens=256, max_num_seqs=8, max_model_len=512,
             page_size=16, num_pages=70) as llm:
        check(llm, requests(lengths, max_tokens=16))
        before = llm.metrics()["preemptions"]
        pairs = requests(range(250, 256), max_tokens=40)  # 1800 tokens in 1104 places
        alone = [run(llm, [pair])[0] for pair in pairs]
        assert run(llm, pairs) == alone
        assert llm.metrics()["preemptions"] > before
