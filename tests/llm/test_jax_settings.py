"""What a user has set jax to for code of his own changes nothing in an engine."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from jaxserve import SamplingParams
from tests.llm import tiny

PROMPTS = [tiny.prompt_ids(length, length) for length in (1, 33, 65, 100)]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=6, temperature=1, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=6, temperature=1, seed=3, top_k=200, top_p=0.9, logprobs=3),
    SamplingParams(max_tokens=6, temperature=0.8, seed=1, repetition_penalty=1.2, presence_penalty=0.3,
                   frequency_penalty=0.2, logit_bias={3: 2.0}, bad_words=["ab"], min_tokens=3,
                   allowed_token_ids=list(range(250))),
]
ENGINES = [{}, {"deterministic": True}, {"attention_backend": "xla", "kv_cache_dtype": "int8"}]
TRACING = [("jax_enable_x64", True), ("jax_numpy_rank_promotion", "raise"), ("jax_numpy_dtype_promotion", "strict")]
RUNNING = [
    ("jax_debug_nans", True), ("jax_debug_infs", True), ("jax_disable_jit", True), ("jax_transfer_guard", "disallow"),
    ("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", not jax.config.jax_threefry_partitionable),
]


def answers(llm) -> list:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.error, output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
            for output in outputs]


@pytest.fixture(scope="module")
def expected(make_llm) -> list:
    """The answers of each engine with jax as it comes."""
    def ask(options) -> list:
        with make_llm(**options) as llm:
            return answers(llm)

    return [ask(options) for options in ENGINES]


@pytest.fixture
def jax_set_to(request):
    name, value = request.param
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


@pytest.mark.parametrize("jax_set_to", TRACING, indirect=True, ids=lambda setting: setting[0])
def test_what_programs_are_traced_under_changes_no_answer(make_llm, expected, jax_set_to):
    for options, right in zip(ENGINES, expected, strict=True):
        with make_llm(**options) as llm:
            assert answers(llm) == right


@pytest.mark.parametrize("jax_set_to", RUNNING, indirect=True, ids=lambda setting: setting[0])
def test_what_programs_run_under_changes_no_answer(make_llm, expected, jax_set_to):
    with make_llm() as llm:
        assert answers(llm) == expected[0]


@pytest.mark.parametrize("jax_set_to", [("jax_default_matmul_precision", "highest")], indirect=True, ids=["highest"])
def test_the_precision_of_products_is_the_users(make_llm, expected, jax_set_to):
    """It makes other programs, which on a CPU do the same."""
    with make_llm() as llm:
        (output,) = llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0][0][1]


def test_settings_may_change_while_an_engine_runs(make_llm, expected):
    with make_llm() as llm:
        jax.config.update("jax_enable_x64", True)
        try:
            assert answers(llm) == expected[0]
        finally:
            jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("jax_set_to", [("jax_debug_nans", True)], indirect=True, ids=["jax_debug_nans"])
def test_a_row_of_nan_still_ends_one_request_only(make_llm, jax_set_to):
    tensors = tiny.random_tensors()
    tensors["model.embed_tokens.weight"][7] = float("nan")
    with make_llm(params=tensors) as llm:
        broken, fine = llm.generate([[7, 7, 7], [8, 9, 10]], max_tokens=4, temperature=0, use_tqdm=False)
        assert broken.error is not None and fine.error is None
        assert llm.metrics()["failed_steps"] == 0


def test_the_settings_are_the_users_again_afterwards(make_llm):
    jax.config.update("jax_enable_x64", True)
    try:
        with make_llm() as llm:
            llm.generate([1, 2, 3], max_tokens=2, use_tqdm=False)
            assert jax.numpy.zeros(2).dtype == "float64"
    finally:
        jax.config.update("jax_enable_x64", False)


def test_x64_from_the_environment(tiny_model):
    """Set before anything is imported."""
    command = [sys.executable, "-m", "jaxserve", "generate", str(tiny_model), "--prompt", "abc", "--max-tokens", "4",
               "--top-k", "5", "--seed", "1", "--json", "--max-num-seqs", "1"]
    plain, wide = (subprocess.run(command, env=os.environ | extra, capture_output=True, text=True)
                   for extra in ({}, {"JAX_ENABLE_X64": "1"}))
    assert wide.returncode == 0, wide.stderr
    assert plain.stdout.split('"token_ids"')[1].split("]")[0] == wide.stdout.split('"token_ids"')[1].split("]")[0]
