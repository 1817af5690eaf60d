from __future__ import annotations

import dataclasses
import logging
import types
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas as kernels
from jaxserve.config import DEFAULT_MAX_MODEL_LEN, AttentionBackend, EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError
from jaxserve.runtime import memory, planning
from jaxserve.runtime.planning import plan_engine, resolve_dtype, resolve_max_model_len
from jaxserve.runtime.programs import ADMIT
from tests.runtime.rig import SPEC, VALID_VOCAB, make_plan

CPU, GPU = (types.SimpleNamespace(platform=name, device_kind="fake", compute_capability="7.5", memory_stats=dict)
            for name in ("cpu", "gpu"))


def with_positions(max_position: int, rope_limit: int | None = None):
    return dataclasses.replace(SPEC, max_position=max_position, rope=dataclasses.replace(SPEC.rope, max_len=rope_limit))


def plan(device=CPU, dtype: str = "float32", spec=SPEC, **options):
    return plan_engine(spec, dtype, EngineConfig(**({"num_pages": 100} | options)), VALID_VOCAB, device)


# -- context length and dtype


@pytest.mark.parametrize("requested, positions, rope_limit, wanted", [
    (None, 2048, None, 2048), (None, 131072, None, DEFAULT_MAX_MODEL_LEN), (None, 2048, 1024, 1024),
    (2048, 2048, None, 2048), (100_000, 131072, None, 100_000), (1, 2048, None, 1)])
def test_context_length(requested, positions, rope_limit, wanted):
    assert resolve_max_model_len(requested, with_positions(positions, rope_limit)) == wanted


@pytest.mark.parametrize("rope_limit", [None, 1024])
def test_a_context_longer_than_the_model_s_positions(rope_limit):
    limit = rope_limit or 2048
    with pytest.raises(ConfigError, match=f"max_model_len={limit + 1}, but tiny has {limit} positions"):
        resolve_max_model_len(limit + 1, with_positions(2048, rope_limit))


@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "float16", "float64", None])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_dtype_that_is_named_is_taken(checkpoint, device):
    for dtype in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(dtype, checkpoint, device) == dtype


@pytest.mark.parametrize("checkpoint, on_gpu", [
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), (None, "bfloat16"),
    ("float64", "bfloat16")])
def test_the_dtype_on_accelerators_is_the_checkpoint_s(checkpoint, on_gpu):
    assert resolve_dtype("auto", checkpoint, GPU) == on_gpu


def test_float16_has_no_kernels_on_tpus():
    tpu = types.SimpleNamespace(platform="tpu")
    assert resolve_dtype("auto", "float16", tpu) == "bfloat16"
    assert resolve_dtype("auto", "float32", tpu) == "float32"


def test_the_dtype_on_cpus_is_the_one_with_fast_paths():
    for checkpoint in ("float32", "float16", "float64", None):
        assert resolve_dtype("auto", checkpoint, CPU) == "float32"
    assert resolve_dtype("auto", "bfloat16", CPU) == "bfloat16"


# -- the plan


def test_defaults_of_cpus_and_accelerators():
    cpu, gpu = plan(CPU).config, plan(GPU).config
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.page_size) == (32, 512, 64)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.page_size) == (256, 2048, 16)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_configuration_has_at_most_12_programs(device, dtype):
    programs = plan(device, dtype).programs
    assert ADMIT in programs and len(set(programs)) == len(programs) <= 12


def test_options_are_taken_over():
    options = {"max_model_len": 100, "max_num_seqs": 5, "max_num_batched_tokens": 64, "page_size": 8, "num_pages": 33,
               "max_waiting_requests": 7, "enable_prefix_caching": False, "scheduling_policy": "priority",
               "decode_steps": 2, "max_logprobs": 4}
    config = plan(**options).config
    assert {name: getattr(config, name) for name in options} == options
    assert plan(deterministic=True).config.deterministic
    assert plan(max_model_len=100, page_size=8).config.max_pages_per_seq == 13


def test_a_budget_smaller_than_a_chunk():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=31.*give 32 or more"):
        plan(max_num_batched_tokens=31)


def test_more_logprobs_than_tokens():
    with pytest.raises(ConfigError, match=f"max_logprobs=91 is more than the vocabulary of {VALID_VOCAB}"):
        plan(max_logprobs=91)


def test_a_pool_that_is_too_small_is_found_before_the_weights_are_loaded(monkeypatch):
    weights_bytes = plan().weights_bytes
    monkeypatch.setattr(memory, "available_ram", lambda: weights_bytes + 100)
    with pytest.raises(OutOfMemoryError, match="of weights to come.*too little"):
        plan(num_pages=None)
    monkeypatch.setattr(memory, "available_ram", lambda: 1 << 30)
    assert plan(num_pages=None, max_num_seqs=2, max_model_len=64).config.num_pages == 3
    assert plan(num_pages=None).pool_reason == "all that 32 sequences of 4096 tokens can use"
    assert plan(num_pages=None, max_num_seqs=1000).pool_reason.startswith("30% of 1.00 GiB free RAM")


def test_a_pool_smaller_than_one_full_request_is_told_with_the_numbers(caplog):
    options = {"max_model_len": 64, "page_size": 8}
    with caplog.at_level(logging.WARNING):
        plan(num_pages=9, **options)
        assert not caplog.records
        plan(num_pages=8, **options)
    assert "room for 57 tokens of one request, but max_model_len is 64" in caplog.text


@pytest.mark.parametrize("options", [{}, {"num_pages": None}])
def test_more_sequences_than_memory_for_their_ids_and_options(monkeypatch, options):
    monkeypatch.setattr(memory, "available_ram", lambda: 1 << 30)
    with pytest.raises(OutOfMemoryError, match=r"max_num_seqs=65536 and max_model_len=4096 does not fit even without a "
                                               r"KV pool: 1.00 GiB free RAM .*1.\d\d GiB for the sequences' ids and "
                                               r"options.* too little; lower max_num_seqs"):
        plan(max_num_seqs=65536, max_model_len=4096, **options)


def test_a_step_whose_temporaries_do_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "available_ram", lambda: 100 << 20)
    with pytest.raises(OutOfMemoryError, match=r"GiB for the largest step are .* max_num_batched_tokens"):
        plan(max_num_batched_tokens=1 << 20, max_num_seqs=1)


def test_sizes_are_those_of_the_arrays():
    plan = make_plan()
    state = jax.eval_shape(plan.init_state)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.pool)) == plan.pool_bytes
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.slots)) == plan.slots_bytes
    assert plan.weights_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(plan.params))
    assert make_plan("bfloat16").weights_bytes == plan.weights_bytes // 2


def test_16_bit_layers_cross_into_the_step_as_bits_where_that_is_faster(monkeypatch):
    for widens, wanted in ((True, jnp.uint16), (False, jnp.bfloat16)):
        monkeypatch.setattr(planning, "CPU_SCAN_WIDENS_BFLOAT16", widens)
        params = make_plan("bfloat16").params
        assert {leaf.dtype for leaf in jax.tree.leaves(params.layers)} == {jnp.dtype(wanted)}
        assert params.embed.dtype == jnp.bfloat16
        assert plan(GPU, "bfloat16").params.layers.wqkv.dtype == jnp.bfloat16


# -- the KV pool's dtype, and who computes attention


@pytest.mark.parametrize("option, dtype, wanted", [
    ("auto", "bfloat16", "bfloat16"), ("auto", "float32", "float32"), ("float16", "float32", "float16"),
    ("int8", "bfloat16", "int8"), ("fp8", "float32", "float8_e4m3fn")])
def test_the_pool_s_dtype(option, dtype, wanted):
    attention = plan(dtype=dtype, kv_cache_dtype=option).step.attention
    assert attention.dtype == wanted


@pytest.mark.parametrize("option", ["float16", "int8", "fp8"])
def test_a_budget_buys_as_many_pages_as_its_dtype_and_its_scales_allow(option):
    """SPEC's rows of 16 values take 64 bytes in float32, 32 in float16, and 16 with a scale of 4 in 8 bits."""
    budget = {"num_pages": None, "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 256}
    row_bytes = SPEC.head_dim * 4
    small = SPEC.head_dim * 2 if option == "float16" else SPEC.head_dim + 4
    float32, smaller = plan(**budget), plan(kv_cache_dtype=option, **budget)
    assert smaller.config.num_pages == pytest.approx(float32.config.num_pages * row_bytes / small, abs=2)
    page_bytes = smaller.pool_bytes // smaller.config.num_pages
    assert smaller.pool_bytes <= 4 << 20 < smaller.pool_bytes + page_bytes


def test_a_backend_that_is_named_is_taken():
    for backend in ("reference", "xla"):
        chosen = plan(attention_backend=backend)
        assert (chosen.step.backend, chosen.backend_reason) == (backend, "set by attention_backend")


def test_a_backend_that_cannot_run_there_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda backend, device, spec: f"{backend} needs a quantum computer")
    with pytest.raises(ConfigError, match="attention_backend='reference' on fake: reference needs a quantum computer; "
                                          "give 'auto', which takes"):
        plan(attention_backend="reference")


def test_the_option_names_every_backend():
    assert set(get_args(AttentionBackend)) == {"auto", *get_args(kernels.Backend)}


@pytest.mark.parametrize("name, value", [("kv_cache_dtype", "int4"), ("attention_backend", "cuda")])
def test_unknown_values_are_refused_with_the_known_ones(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be one of auto, .*, got '{value}'"):
        EngineConfig(**{name: value})


def test_temporaries_of_the_largest_step_do_not_depend_on_the_pool(xla_cache):
    """So they can be asked for before the pool has a size."""
    small, large = make_plan(num_pages=2), make_plan()
    temp = planning._step_temp_bytes(small, xla_cache)
    assert 0 < temp < 0.1 * large.pool_bytes
    assert planning._step_temp_bytes(large, xla_cache) == pytest.approx(temp, rel=0.02)
