"""After an eager start nothing is compiled any more, whatever comes."""

from __future__ import annotations

import pytest

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig, ResolvedConfig
from jaxserve.runtime.buckets import make_buckets
from jaxserve.runtime.executables import compilations
from tests.llm import tiny
from tests.llm.tiny import prompt_ids


@pytest.fixture
def nothing_compiles(llm):
    """Checks that the test compiled nothing, not even outside the engine's own programs."""
    before, executables = compilations(), llm.metrics()["executables"]
    yield
    assert compilations() == before
    assert llm.metrics()["executables"] == executables


def test_a_fresh_engine_counts_from_its_warm_up(make_llm):
    with make_llm(compile_mode="eager") as llm:
        for length in (1, 33, 65, 127):
            llm.generate([prompt_ids(length)] * 4, max_tokens=1, logprobs=1, use_tqdm=False)
        assert llm.metrics()["compilations_after_warmup"] == 0
        assert llm.metrics()["executables"] == 7


def test_any_length_and_batch_size(llm, nothing_compiles):
    for size in (1, 2, 3, 5, 9):
        llm.reset_prefix_cache()
        llm.generate([prompt_ids(1 + (37 * i) % 120, seed=i) for i in range(size)],
                     SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"top_k": 5}, {"top_k": 200, "top_p": 0.7}, {"min_p": 0.1}, {"seed": 3, "n": 4},
    {"repetition_penalty": 1.1}, {"presence_penalty": 1, "frequency_penalty": 1}, {"logit_bias": {3: 5}},
    {"allowed_token_ids": [1, 2]}, {"bad_words": ["ab"]}, {"min_tokens": 3}, {"stop": ["xyz"]},
    {"stop_token_ids": [5]}, {"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20},
    {"cache_salt": "s"}, {"detokenize": False},
], ids=str)
def test_any_option(llm, nothing_compiles, options):
    prompts = [prompt_ids(3), prompt_ids(70)]
    llm.generate(prompts, [SamplingParams(max_tokens=4, **options), SamplingParams(max_tokens=4)], use_tqdm=False)


def test_aborts_preemption_and_a_reset_of_the_cache(llm, nothing_compiles):
    stream = llm.stream(prompt_ids(50), max_tokens=40, ignore_eos=True)
    next(stream)
    llm.reset_prefix_cache()
    stream.close()
    before = llm.metrics()["preemptions"]
    llm.generate([prompt_ids(60, seed=i) for i in range(3)], max_tokens=60, ignore_eos=True, use_tqdm=False)
    assert llm.metrics()["preemptions"] > before


def test_recovery_from_a_fault(llm, nothing_compiles, monkeypatch):
    calls = []

    def launch(plan, launch=llm._runner.launch):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return launch(plan)

    monkeypatch.setattr(llm._runner, "launch", launch)
    llm.generate(prompt_ids(9), max_tokens=6, ignore_eos=True, use_tqdm=False)
    assert len(calls) > 6


def test_new_weights(llm, nothing_compiles):
    tensors = tiny.random_tensors(seed=1)
    try:
        llm.update_params(tensors)
        llm.generate(prompt_ids(9), max_tokens=6, use_tqdm=False)
    finally:
        llm.update_params(tiny.random_tensors())


@pytest.mark.parametrize("cpu", [True, False])
def test_the_default_configuration_has_at_most_12_executables(cpu):
    config = EngineConfig()
    resolved = ResolvedConfig(
        max_model_len=8192, max_num_seqs=32 if cpu else 256, max_num_batched_tokens=512 if cpu else 2048,
        max_waiting_requests=config.max_waiting_requests, page_size=64 if cpu else 16, num_pages=1000,
        enable_prefix_caching=True, scheduling_policy="fcfs", decode_steps=1, deterministic=False, max_logprobs=20,
        query_block=32, vocab_size=50_000)
    assert len(make_buckets(resolved, min_decode_rows=1)) + 1 <= 12  # and the upload of a slot
