"""Native kernels for CPUs, compiled on first use: paged attention, and products with stacked matrices.

XLA's CPU backend gathers pages on one core before it multiplies. The attention kernel reads them where they lie, on
all cores; the pool is laid out as in `xla`. The methods are described in attention.cc and linear.cc.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import xla
from kernels_pallas.api import POOL_DTYPES, AttentionBatch, AttentionSpec
from kernels_pallas.cpu_native.build import Unavailable, compiled_by, targets
from kernels_pallas.quantize import quantize

__all__ = ["Unavailable", "compiled_by", "init_pool", "linear", "paged_attention", "plan_batch", "pool_spec",
           "unsupported"]

pool_spec = xla.pool_spec


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot be had here; None: it is compiled and loaded, and serves every spec."""
    del spec
    try:
        targets()
    except Unavailable as error:
        return f"anything here: {error}"
    return None


def init_pool(spec: AttentionSpec):
    """A pool that takes memory only as its pages are written; what it holds before is never used."""
    leaves, tree = jax.tree.flatten(pool_spec(spec))
    return jax.tree.unflatten(tree, jax.ffi.ffi_call(targets()["uninitialized"], leaves)())


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> AttentionBatch:
    del spec
    return batch


def paged_attention(q, k, v, pool, batch: AttentionBatch, *, layer, window, sinks, spec: AttentionSpec):
    empty = jnp.zeros(0, jnp.float32)
    k_scale = v_scale = empty
    if spec.quantized:
        (k, k_scale), (v, v_scale) = quantize(k, spec.dtype), quantize(v, spec.dtype)
        k, v = (jax.lax.bitcast_convert_type(x, pool["k"].dtype) for x in (k, v))
    else:
        k, v = k.astype(q.dtype), v.astype(q.dtype)

    def scalar(x) -> jax.Array:
        return jnp.asarray(x, jnp.int32).reshape(1)

    pools = (pool["k"], pool["v"], pool.get("k_scale", empty), pool.get("v_scale", empty))
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools))
    call = jax.ffi.ffi_call(targets()["paged_attention"], results,
                            input_output_aliases={3 + i: 1 + i for i in range(4)})
    out, *pools = call(
        q, k, v, *pools, k_scale, v_scale, batch.block_tables, batch.kv_lens, batch.query_starts, batch.query_lens,
        scalar(layer), scalar(0 if window is None else window), empty if sinks is None else sinks.astype(jnp.float32),
        num_pages=np.int64(spec.num_pages), num_decode=np.int64(batch.num_decode), scale=np.float32(spec.scale),
        softcap=np.float32(spec.softcap or 0.0), pool_type=np.int64(POOL_DTYPES.index(spec.dtype)))
    return out, dict(zip(("k", "v", "k_scale", "v_scale")[:len(pool)], pools))


def linear(x: jax.Array, stack: jax.Array, layer: jax.Array) -> jax.Array:
    """`x @ stack[layer]` without a copy of the matrix, in float32.

    Args:
        x: f32[T, in].
        stack: [L, in, out], float32, bfloat16, or its bits as uint16.
        layer: i32 scalar.

    Returns:
        f32[T, out].
    """
    call = jax.ffi.ffi_call(targets()["linear"], jax.ShapeDtypeStruct((x.shape[0], stack.shape[2]), jnp.float32))
    return call(x, stack, jnp.asarray(layer, jnp.int32).reshape(1))
