"""The oracle: obvious and slow. It gathers every sequence's whole context and uses one plain softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionBatch, AttentionSpec, token_rows
from kernels_pallas.quantize import quantize


def unsupported(spec: AttentionSpec) -> str | None:
    del spec
    return None


def pool_spec(spec: AttentionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    pool = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)) for name in ("k", "v")}
    if spec.quantized:
        pool |= {f"{name}_scale": jax.ShapeDtypeStruct(shape[:3], jnp.float32) for name in ("k", "v")}
    return pool


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> AttentionBatch:
    del spec
    return batch


def paged_attention(q, k, v, pool, batch: AttentionBatch, *, layer, window, sinks, spec: AttentionSpec):
    seq, position, valid = token_rows(batch)
    base = layer * spec.num_pages
    page = jnp.where(valid, batch.block_tables[seq, position // spec.page_size], 0) + base
    rows = {"k": k, "v": v}
    if spec.quantized:
        for name in ("k", "v"):
            rows[name], rows[f"{name}_scale"] = quantize(rows[name], spec.dtype)
    pool = {name: leaf.at[page, :, position % spec.page_size].set(rows[name].astype(leaf.dtype))
            for name, leaf in pool.items()}

    tables = batch.block_tables[seq] + base                                         # [T, pages_per_seq]
    context = tables.shape[1] * spec.page_size

    def contexts(name: str):                                                        # [T, C, K, D]
        x = pool[name][tables].astype(jnp.float32)
        if spec.quantized:
            x *= pool[f"{name}_scale"][tables][..., None]
        return x.swapaxes(2, 3).reshape(q.shape[0], context, spec.num_kv_heads, spec.head_dim)

    keys, values = contexts("k"), contexts("v")
    group = spec.num_heads // spec.num_kv_heads
    queries = q.astype(jnp.float32).reshape(-1, spec.num_kv_heads, group, spec.head_dim)
    scores = jnp.einsum("tkgd,tckd->tkgc", queries, keys, precision="highest") * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    at = jnp.arange(context)[None, :]
    seen = (at <= position[:, None]) & valid[:, None]
    if window is not None:
        seen &= at > position[:, None] - window
    # Unread rows may hold anything, NaN included, and 0 * NaN is NaN.
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    values = jnp.where(seen[:, :, None, None], values, 0.0)
    if sinks is not None:  # one more key, whose value is zero
        sink = jnp.broadcast_to(sinks.reshape(1, spec.num_kv_heads, group, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
        values = jnp.pad(values, ((0, 0), (0, 1), (0, 0), (0, 0)))
    weights = jnp.where(valid[:, None, None, None], jax.nn.softmax(scores, axis=-1), 0.0)
    out = jnp.einsum("tkgc,tckd->tkgd", weights, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype), pool
