"""From a model and the user's options to an EnginePlan: every None gets its value, and the KV pool its size."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kernels_pallas as kernels
from jaxserve.config import DEFAULT_MAX_MODEL_LEN, AttentionBackend, EngineConfig, ResolvedConfig
from jaxserve.errors import ConfigError
from jaxserve.models.params import abstract_params
from jaxserve.models.spec import DecoderSpec
from jaxserve.runtime.buckets import make_buckets
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.memory import PoolSize, size_pool
from jaxserve.runtime.programs import EnginePlan
from jaxserve.runtime.step import StepSpec
from kernels_pallas._compat import CPU_SCAN_WIDENS_BFLOAT16

logger = logging.getLogger(__name__)

QUERY_BLOCK = 32

# Up to how many token rows the native CPU product beats XLA's, by dtype of the weights: measured with SmolLM2-135M on
# two Zen 5 cores. XLA has instructions for bfloat16 that the kernel does not use.
NATIVE_LINEAR_ROWS = {"float32": 128, "bfloat16": 16, "float16": 0}


def resolve_max_model_len(requested: int | None, spec: DecoderSpec) -> int:
    """The context length of an engine.

    Raises:
        ConfigError: more than the model's positions reach.
    """
    limit = spec.max_position if spec.rope.max_len is None else min(spec.max_position, spec.rope.max_len)
    if requested is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if requested > limit:
        raise ConfigError(f"max_model_len={requested}, but {spec.name} has {limit} positions; give at most {limit}")
    return requested


def resolve_dtype(dtype: str, checkpoint_dtype: str | None, device: jax.Device) -> str:
    """The dtype of weights and activations; see docs/models.md for why."""
    if dtype != "auto":
        return dtype
    if device.platform == "cpu":
        # bfloat16 is about 1.5 times as fast as float32; float16 has no fast path on CPUs.
        return "bfloat16" if checkpoint_dtype == "bfloat16" else "float32"
    if device.platform == "tpu" and checkpoint_dtype == "float16":
        return "bfloat16"  # TPUs multiply no float16, and the kernels for them have none
    return checkpoint_dtype if checkpoint_dtype in ("float16", "bfloat16", "float32") else "bfloat16"


def resolve_kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of the KV pool, as `kernels_pallas` calls it, of an engine whose activations are of `dtype`."""
    return {"auto": dtype, "fp8": "float8_e4m3fn"}.get(kv_cache_dtype, kv_cache_dtype)


def resolve_backend(requested: AttentionBackend, device: jax.Device,
                    attention: kernels.AttentionSpec) -> kernels.Choice:
    """The attention backend, and why.

    Raises:
        ConfigError: the backend that was asked for cannot run there.
    """
    best = kernels.choose_backend(device, attention)
    if requested == "auto":
        return best
    objection = kernels.why_not(requested, device, attention)
    if objection is not None:
        raise ConfigError(f"attention_backend={requested!r} on {device.device_kind}: {objection}; give 'auto', which "
                          f"takes {best.backend!r} here")
    return kernels.Choice(requested, "set by attention_backend")


def plan_engine(spec: DecoderSpec, dtype: str, config: EngineConfig, valid_vocab: int, device: jax.Device,
                weights_loaded: bool = False) -> EnginePlan:
    """Resolves the options and sizes the pool.

    Args:
        dtype: of the weights, from `resolve_dtype`.
        valid_vocab: ids below it may be sampled.
        device: where everything is going to live.
        weights_loaded: the weights are in the device's memory already, so no room needs to be kept for them.

    Raises:
        ConfigError: an option does not fit the model.
        OutOfMemoryError: weights and pool do not fit, with the numbers.
    """
    smallest = smallest_plan(spec, dtype, config, valid_vocab, device)
    size = pool_size(smallest, config, device, weights_bytes=0 if weights_loaded else smallest.weights_bytes,
                     step_temp_bytes=lambda: _step_temp_bytes(smallest, config.compilation_cache_dir))
    plan = with_pool(smallest, size)
    logger.info("attention backend: %s (%s)", plan.step.backend, plan.backend_reason)
    logger.info("KV pool: %d pages of %d tokens in %s, %.0f MiB (%s)", size.num_pages, plan.config.page_size,
                plan.step.attention.dtype, plan.pool_bytes / 2**20, size.reason)
    # Page 0 is the dummy, and a sequence's last token needs no place.
    room = (size.num_pages - 1) * plan.config.page_size + 1
    if room < plan.config.max_model_len:
        logger.warning("the KV pool has room for %d tokens of one request, but max_model_len is %d: requests that may "
                       "become longer, as those without max_tokens, are refused; set max_model_len=%d or give more "
                       "pages", room, plan.config.max_model_len, room)
    return plan


def smallest_plan(spec: DecoderSpec, dtype: str, config: EngineConfig, valid_vocab: int,
                  device: jax.Device) -> EnginePlan:
    """Every option resolved, but for the pool, which has its least size. Arguments and errors: see `plan_engine`."""
    cpu = device.platform == "cpu"
    valid_vocab = min(valid_vocab, spec.vocab_size)
    resolved = ResolvedConfig(
        max_model_len=resolve_max_model_len(config.max_model_len, spec),
        max_num_seqs=config.max_num_seqs or (32 if cpu else 256),
        max_num_batched_tokens=config.max_num_batched_tokens or (512 if cpu else 2048),
        max_waiting_requests=config.max_waiting_requests, page_size=config.page_size or (64 if cpu else 16),
        num_pages=2, enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy, decode_steps=config.decode_steps,
        deterministic=config.deterministic, max_logprobs=config.max_logprobs, query_block=QUERY_BLOCK,
        vocab_size=spec.vocab_size)
    if resolved.max_num_batched_tokens < QUERY_BLOCK:
        raise ConfigError(f"max_num_batched_tokens={resolved.max_num_batched_tokens}, but a prefill chunk takes "
                          f"{QUERY_BLOCK} rows at least; give {QUERY_BLOCK} or more")
    if config.max_logprobs > valid_vocab:
        raise ConfigError(f"max_logprobs={config.max_logprobs} is more than the vocabulary of {valid_vocab}")

    attention = kernels.AttentionSpec(
        num_layers=spec.num_layers, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        num_pages=resolved.num_pages, page_size=resolved.page_size,
        dtype=resolve_kv_dtype(config.kv_cache_dtype, dtype), scale=spec.attn_scale, softcap=spec.attn_softcap,
        query_block=QUERY_BLOCK)
    choice = resolve_backend(config.attention_backend, device, attention)
    step = StepSpec(model=spec, attention=attention, backend=choice.backend,
                    valid_vocab=valid_vocab, max_logprobs=config.max_logprobs,
                    native_linear_rows=NATIVE_LINEAR_ROWS[dtype] if choice.backend == "cpu_native" else 0)
    params = abstract_params(spec, dtype)
    if takes_bits(dtype, device):
        params = dataclasses.replace(params, layers=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.uint16), params.layers))
    # A single bfloat16 row takes a slow path of XLA's CPU matmul, two rows do not.
    buckets = make_buckets(resolved, min_decode_rows=2 if cpu and dtype == "bfloat16" else 1)
    return EnginePlan(device=device, config=resolved, step=step, params=params, buckets=buckets,
                      backend_reason=choice.reason, pool_reason="")


def pool_size(plan: EnginePlan, config: EngineConfig, device: Any, *, weights_bytes: int,
              step_temp_bytes: Callable[[], int]) -> PoolSize:
    """How large the pool of a plan may be on `device`; see `size_pool`."""
    return size_pool(
        config, page_bytes=plan.pool_bytes // plan.config.num_pages, page_size=plan.config.page_size,
        max_model_len=plan.config.max_model_len, max_num_seqs=plan.config.max_num_seqs, device=device,
        weights_bytes=weights_bytes, slots_bytes=plan.slots_bytes, step_temp_bytes=step_temp_bytes)


def with_pool(plan: EnginePlan, size: PoolSize) -> EnginePlan:
    """The plan with a pool of this size."""
    attention = dataclasses.replace(plan.step.attention, num_pages=size.num_pages)
    return dataclasses.replace(
        plan, config=dataclasses.replace(plan.config, num_pages=size.num_pages),
        step=dataclasses.replace(plan.step, attention=attention), pool_reason=size.reason)


def takes_bits(dtype: str, device: jax.Device) -> bool:
    """Whether the step takes the layers' weights as uint16; see `models.params.bits_as_bfloat16`."""
    return dtype == "bfloat16" and device.platform == "cpu" and CPU_SCAN_WIDENS_BFLOAT16


def _step_temp_bytes(smallest: EnginePlan, cache_dir: str | None) -> int:
    """Temporaries of the largest step. On CPUs, where XLA does not say all and a compilation is dear, an estimate. The
    pool is updated in place, so they do not depend on its size: compile with the smallest pool, and ask."""
    if smallest.device.platform == "cpu":
        return smallest.estimated_temp_bytes
    largest = max(smallest.buckets, key=lambda bucket: bucket.num_tokens)
    analysis = Executables(smallest.lower, cache_dir).get(largest).memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
