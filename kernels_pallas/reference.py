"""The oracle: obvious and slow. It gathers every sequence's whole context and uses one plain softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionBatch, AttentionSpec, token_rows


def pool_spec(spec: AttentionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)) for name in ("k", "v")}


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> AttentionBatch:
    del spec
    return batch


def paged_attention(q, k, v, pool, batch: AttentionBatch, *, layer, window, spec: AttentionSpec):
    seq, position, valid = token_rows(batch)
    base = layer * spec.num_pages
    page = jnp.where(valid, batch.block_tables[seq, position // spec.page_size], 0) + base
    pool = {name: pool[name].at[page, :, position % spec.page_size].set(rows.astype(pool[name].dtype))
            for name, rows in (("k", k), ("v", v))}

    tables = batch.block_tables[seq] + base                                         # [T, pages_per_seq]
    context = tables.shape[1] * spec.page_size
    keys, values = (pool[n][tables].swapaxes(2, 3).reshape(q.shape[0], context, spec.num_kv_heads, spec.head_dim)
                    .astype(jnp.float32) for n in ("k", "v"))                       # [T, C, K, D]
    group = spec.num_heads // spec.num_kv_heads
    queries = q.astype(jnp.float32).reshape(-1, spec.num_kv_heads, group, spec.head_dim)
    scores = jnp.einsum("tkgd,tckd->tkgc", queries, keys, precision="highest") * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    at = jnp.arange(context)[None, :]
    seen = (at <= position[:, None]) & valid[:, None]
    if window is not None:
        seen &= at > position[:, None] - window
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    weights = jnp.where(seen[:, None, None, :], jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # Unread rows may hold anything, NaN included, and 0 * NaN is NaN.
    values = jnp.where(seen[:, :, None, None], values, 0.0)
    out = jnp.einsum("tkgc,tckd->tkgd", weights, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype), pool
