"""The call: write the new rows, then decode rows and prefill chunks, each by their own kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_gpu.combine import combine
from kernels_pallas.mosaic_gpu.decode import decode_partials
from kernels_pallas.mosaic_gpu.layout import group_size
from kernels_pallas.mosaic_gpu.plan import Plan
from kernels_pallas.mosaic_gpu.prefill import prefill


def paged_attention(q: jax.Array, k: jax.Array, v: jax.Array, pool, plan: Plan, *, layer, window, sinks,
                    spec: AttentionSpec):
    """As `kernels_pallas.paged_attention`. Queries are rounded to the pool's dtype, which wgmma multiplies."""
    T, H, D = q.shape
    K, G = spec.num_kv_heads, group_size(spec)
    base = (layer * spec.num_pages).astype(jnp.int32)
    page, offset = base + plan.write_page, plan.write_offset
    # XLA's scatter is in place. It is a launch of its own before the kernels, as rows of one chunk are read by others.
    pool = {name: pool[name].at[page, :, offset].set(rows.astype(pool[name].dtype))
            for name, rows in (("k", k), ("v", v))}
    queries = q.astype(pool["k"].dtype).reshape(T, K, G, D)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, G)
    num_decode = 0 if plan.decode is None else plan.decode.splits.shape[0]
    parts = []
    if plan.decode is not None:
        partials = decode_partials(queries[:num_decode], pool, plan.decode, base, window, spec)
        parts.append(combine(partials, plan.decode.splits, sinks, G).astype(q.dtype))
    if plan.prefill is not None:
        parts.append(prefill(queries[num_decode:], pool, plan.prefill, base, window, sinks, spec).astype(q.dtype))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.reshape(T, H, D), pool
