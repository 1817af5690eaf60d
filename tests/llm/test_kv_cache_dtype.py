"""A KV pool in fewer bits than the activations, and attention by a backend that is named."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.llm.tiny import prompt_ids

# Around pages (8 tokens) and blocks of prefill rows (32); three of the long ones do not fit into the pool together.
LENGTHS = (1, 8, 9, 33, 64, 100, 104, 105)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantized(request: pytest.FixtureRequest, make_llm):
    with make_llm(kv_cache_dtype=request.param, deterministic=True) as llm:
        yield llm


def bits(output) -> list:
    [completion] = output.outputs
    return [[(token, np.float32(entry.logprob).tobytes()) for token, entry in position.items()]
            for position in completion.logprobs]


def test_shared_pages_and_recomputed_ones_hold_the_same_values_and_scales(quantized: LLM):
    """Alone, from the prefix cache, and in a crowd that is preempted: the same bits."""
    alone, prompts, cached = [], [prompt_ids(n, seed=n) for n in LENGTHS], 0
    for prompt in prompts:
        quantized.reset_prefix_cache()
        miss, hit = (quantized.generate(prompt, PARAMS, use_tqdm=False)[0] for _ in range(2))
        cached += hit.num_cached_tokens
        assert bits(hit) == bits(miss)
        alone.append(bits(miss))
    assert cached > 0
    quantized.reset_prefix_cache()
    before = quantized.metrics()["preemptions"]
    crowd = quantized.generate(prompts[::-1], PARAMS, use_tqdm=False)
    assert quantized.metrics()["preemptions"] > before
    assert [bits(output) for output in crowd[::-1]] == alone


@pytest.mark.parametrize("kv_cache_dtype, allowed", [("float16", 0.01), ("bfloat16", 0.05), ("int8", 0.1),
                                                     ("fp8", 0.5)])
def test_log_probabilities_stay_near_those_of_the_model(make_llm, dense, kv_cache_dtype: str, allowed: float):
    prompt = prompt_ids(100, seed=5)
    with make_llm(kv_cache_dtype=kv_cache_dtype) as llm:
        [output] = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:])]
    wanted = dense.logprobs(prompt)[np.arange(99), prompt[1:]]
    error = np.abs(np.array(found) - wanted).max()
    assert 0 < error < allowed


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_named_backends_say_the_same(make_llm, dense, backend: str):
    prompts = [prompt_ids(n, seed=n) for n in (5, 40)]
    with make_llm(attention_backend=backend) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [dense.greedy(prompt, 8) for prompt in prompts]
