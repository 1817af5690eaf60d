"""Portable paged attention in plain XLA: CPUs, and GPUs that have no kernel of their own.

Query rows are cut into blocks of one sequence each (one row for decode, `query_block` rows for
prefill). Blocks are sorted by the length of their context and worked off in tiles; a tile walks its
contexts in steps of `KV_BLOCK` tokens with an online softmax (Milakov and Gimelshein, 2018; Dao et al.,
2022), and a dynamic trip count: no padded context is gathered, and no shape depends on its length.
First come the steps that every row of a block sees whole, without masks, then the ragged ones.

A block's arithmetic never depends on the tile's other blocks: every block visits its own context in
the same steps, and steps that are not its own leave it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.api import AttentionBatch, AttentionSpec, token_rows
from kernels_pallas.quantize import quantize

# Measured on two Zen 5 cores with SmolLM2-135M's heads (3 kv heads of 64): a decode row's cost is reading K and
# V, 13 to 19 GB/s here. Steps of 32 tokens lose a third to the loop's overhead; larger tiles lose more to rows
# of unequal length than they gain. A prefill tile of 8 blocks runs its products on both cores.
KV_BLOCK = 64
DECODE_TILE = 8
PREFILL_TILE = 8

# A running maximum starts above what masked scores are set to: then exp(masked - maximum) is 0 even in a
# step where a row sees nothing, and no inf - inf can occur.
_MASKED = -1e30
_LOWEST = -1e20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Blocks:
    """Query blocks of equal height R, sorted by context length, longest first.

    order: i32[B] block -> place before sorting; inverse: its inverse. tables: i32[B, pages_per_seq],
    padded to whole KV steps. positions: i32[B, R] of each query row (-1: padding). ends: i32[B], tokens
    of context that the block needs (0: padding block). firsts: i32[B] lowest query position.
    """

    order: jax.Array
    inverse: jax.Array
    tables: jax.Array
    positions: jax.Array
    ends: jax.Array
    firsts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """write_page, write_offset: i32[T], where each token row's K/V goes (page of layer 0)."""

    write_page: jax.Array
    write_offset: jax.Array
    decode: _Blocks | None
    prefill: _Blocks | None


def unsupported(spec: AttentionSpec) -> str | None:
    del spec
    return None


def _storage_dtype(spec: AttentionSpec) -> jnp.dtype:
    # XLA's CPU backend turns a whole pool of 8 bit floats into wider ones and back on every scatter, and jax 0.10's
    # one of 16 bit floats too. The same bits as integers stay in place on every version and platform.
    dtype = jnp.dtype(spec.dtype)
    small_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if small_float else dtype


def _to_storage(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    x = x.astype(spec.dtype)
    storage = _storage_dtype(spec)
    return x if x.dtype == storage else lax.bitcast_convert_type(x, storage)


def _from_storage(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    dtype = jnp.dtype(spec.dtype)
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def pool_spec(spec: AttentionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    pages, K, N, D = spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim
    # Keys lie transposed, so that both products of attention find their operands as XLA's matmul wants them.
    pool = {"k": jax.ShapeDtypeStruct((pages, K, D, N), _storage_dtype(spec)),
            "v": jax.ShapeDtypeStruct((pages, K, N, D), _storage_dtype(spec))}
    if spec.quantized:
        pool |= {f"{name}_scale": jax.ShapeDtypeStruct((pages, K, N), jnp.float32) for name in ("k", "v")}
    return pool


def _sort(tables, positions, kv_block_pages: int) -> _Blocks:
    ends = positions.max(axis=1) + 1                       # [B]; 0 for padding
    order = jnp.argsort(-ends, stable=True).astype(jnp.int32)
    pad = -tables.shape[1] % kv_block_pages
    tables = jnp.pad(tables, ((0, 0), (0, pad)))
    firsts = jnp.where(positions >= 0, positions, jnp.int32(2**30)).min(axis=1)
    return _Blocks(order=order, inverse=jnp.argsort(order).astype(jnp.int32), tables=tables[order],
                   positions=positions[order], ends=ends[order], firsts=firsts[order])


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    seq, position, valid = token_rows(batch)
    page = jnp.where(valid, batch.block_tables[seq, position // spec.page_size], 0)
    kv_block_pages = max(1, KV_BLOCK // spec.page_size)
    rows = jnp.where(valid, position, -1)
    D, R = batch.num_decode, spec.query_block
    decode = prefill = None
    if D:
        decode = _sort(batch.block_tables[:D], rows[:D, None], kv_block_pages)
    if batch.num_tokens > D:
        positions = rows[D:].reshape(-1, R)
        prefill = _sort(batch.block_tables[seq[D::R]], positions, kv_block_pages)
    return Plan(write_page=page, write_offset=position % spec.page_size, decode=decode, prefill=prefill)


def _attend(q, pool, blocks: _Blocks, base, window, sinks, tile: int, spec: AttentionSpec):
    """q [B, R, H, D] -> out [B, R, H, D] float32."""
    B, R, H, D = q.shape
    K, N = spec.num_kv_heads, spec.page_size
    G = H // K
    kv_block_pages = max(1, KV_BLOCK // N)
    kv_block = kv_block_pages * N
    tile = min(tile, B)
    pad = -B % tile

    q = q[blocks.order].astype(jnp.float32) * spec.scale
    q = q.reshape(B, R, K, G, D).transpose(0, 2, 1, 3, 4).reshape(B, K, R * G, D)

    def padded(x, fill):
        return jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=fill) if pad else x

    q, tables, positions = padded(q, 0), padded(blocks.tables, 0), padded(blocks.positions, -1)
    ends, firsts = padded(blocks.ends, 0), padded(blocks.firsts, 2**30)
    if window is None:
        whole_steps = jnp.where(ends > 0, (firsts + 1) // kv_block, 0)   # seen by all of the block's rows
        first_steps = jnp.zeros_like(ends)
    else:
        whole_steps = jnp.zeros_like(ends)
        first_steps = jnp.where(ends > 0, jnp.maximum(firsts - window + 1, 0) // kv_block, 0)
    ragged_starts = first_steps + whole_steps
    ragged_steps = -(-ends // kv_block) - ragged_starts              # [B]

    def run_tile(t, out):
        def part(x):
            return lax.dynamic_slice_in_dim(x, t * tile, tile)

        q_t, table_t, whole_t, ragged_t = part(q), part(tables), part(whole_steps), part(ragged_starts)
        pos_t = jnp.repeat(part(positions), G, axis=1)               # [I, R*G]
        sink_t = None if sinks is None else jnp.tile(sinks.reshape(K, G), (1, R))[None, :, :, None]  # [1, K, R*G, 1]

        def read(name, pages):
            # One contiguous row a page: XLA copies it at full speed only when no shape or mask is fused in.
            rows = pool[name].reshape(pool[name].shape[0], -1).at[pages.reshape(-1)].get(mode="promise_in_bounds")
            rows = lax.optimization_barrier(rows).reshape(tile, kv_block_pages, *pool[name].shape[1:])
            return _from_storage(rows, spec).astype(jnp.float32)

        def read_scales(name, pages):
            """[I, K, 1, n], to multiply scores and weights with."""
            scales = pool[name].at[pages].get(mode="promise_in_bounds")                      # [I, p, K, N]
            return scales.swapaxes(1, 2).reshape(tile, K, 1, kv_block)

        def step(at_step, carry, whole: bool):
            """One KV step; at_step [I] or scalar is its index. `whole`: every query row sees all of it."""
            top, total, acc = carry                                  # [I, K, RG, 1], same, [I, K, RG, D]
            at_step = jnp.broadcast_to(at_step, (tile,))
            at_page = at_step[:, None] * kv_block_pages + jnp.arange(kv_block_pages)         # [I, pages]
            at_page = jnp.minimum(at_page, table_t.shape[1] - 1)
            pages = jnp.take_along_axis(table_t, at_page, axis=1) + base
            k, v = read("k", pages), read("v", pages)                # [I, p, K, D, N], [I, p, K, N, D]
            v_scale = read_scales("v_scale", pages) if spec.quantized else None
            # Pages stay a batch axis: merging them into one context axis would transpose K and V.
            scores = jnp.einsum("ikqd,ipkdn->ikqpn", q_t, k, preferred_element_type=jnp.float32)
            scores = scores.reshape(tile, K, R * G, kv_block)
            if spec.quantized:
                scores *= read_scales("k_scale", pages)
            if spec.softcap is not None:
                scores = spec.softcap * jnp.tanh(scores / spec.softcap)
            if not whole:
                at = at_step[:, None] * kv_block + jnp.arange(kv_block)                      # [I, n]
                seen = at[:, None, :] <= pos_t[:, :, None]           # [I, RG, n]
                if window is not None:
                    seen &= at[:, None, :] > pos_t[:, :, None] - window
                scores = jnp.where(seen[:, None], scores, _MASKED)
                # Rows beyond the context may hold anything, NaN included, and 0 * NaN is NaN.
                written = (at <= pos_t.max(axis=1, keepdims=True)).reshape(tile, kv_block_pages, 1, N, 1)
                v = jnp.where(written, v, 0.0)
                if v_scale is not None:
                    v_scale = jnp.where(written.reshape(tile, 1, 1, kv_block), v_scale, 0.0)
            new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_top)                      # exactly 0 where masked
            keep = jnp.exp(top - new_top)
            scaled = weights if v_scale is None else weights * v_scale
            by_page = scaled.reshape(tile, K, R * G, kv_block_pages, N)
            acc = acc * keep + jnp.einsum("ikqpn,ipknd->ikqd", by_page, v, preferred_element_type=jnp.float32)
            return new_top, total * keep + weights.sum(axis=-1, keepdims=True), acc

        def whole_step(i, carry):
            active = (i < whole_t)[:, None, None, None]
            return jax.tree.map(lambda old, new: jnp.where(active, new, old), carry, step(i, carry, whole=True))

        def ragged_step(i, carry):
            return step(ragged_t + i, carry, whole=False)

        shape = (tile, K, R * G)
        carry = (jnp.full((*shape, 1), _LOWEST, jnp.float32), jnp.zeros((*shape, 1), jnp.float32),
                 jnp.zeros((*shape, D), jnp.float32))
        if window is None:
            carry = lax.fori_loop(0, whole_t.max(), whole_step, carry)
        top, total, acc = lax.fori_loop(0, part(ragged_steps).max(), ragged_step, carry)
        if sinks is not None:
            # The sink is one more step of the same softmax, with a weight and no value.
            new_top = jnp.maximum(top, sink_t)
            keep = jnp.exp(top - new_top)
            total, acc = total * keep + jnp.exp(sink_t - new_top), acc * keep
        result = jnp.where((pos_t >= 0)[:, None, :, None], acc / jnp.maximum(total, 1e-30), 0.0)
        return lax.dynamic_update_slice_in_dim(out, result, t * tile, axis=0)

    num_tiles = -(-jnp.sum(ends > 0) // tile)
    out = lax.fori_loop(0, num_tiles, run_tile, jnp.zeros((B + pad, K, R * G, D), jnp.float32))
    out = out[blocks.inverse]
    return out.reshape(B, K, R, G, D).transpose(0, 2, 1, 3, 4).reshape(B, R, H, D)


def paged_attention(q, k, v, pool, plan: Plan, *, layer, window, sinks, spec: AttentionSpec):
    T, H, D = q.shape
    base = (layer * spec.num_pages).astype(jnp.int32)
    page, offset = base + plan.write_page, plan.write_offset
    scales = {}
    if spec.quantized:
        (k, k_scale), (v, v_scale) = quantize(k, spec.dtype), quantize(v, spec.dtype)
        scales = {"k_scale": pool["k_scale"].at[page, :, offset].set(k_scale),
                  "v_scale": pool["v_scale"].at[page, :, offset].set(v_scale)}
    pool = {"k": pool["k"].at[page, :, :, offset].set(_to_storage(k, spec)),
            "v": pool["v"].at[page, :, offset].set(_to_storage(v, spec)), **scales}
    parts = []
    num_decode = 0 if plan.decode is None else plan.decode.ends.shape[0]
    if plan.decode is not None:
        parts.append(_attend(q[:num_decode, None], pool, plan.decode, base, window, sinks, DECODE_TILE, spec)[:, 0])
    if plan.prefill is not None:
        blocks = q[num_decode:].reshape(-1, spec.query_block, H, D)
        parts.append(_attend(blocks, pool, plan.prefill, base, window, sinks, PREFILL_TILE, spec)
                     .reshape(-1, H, D))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.astype(q.dtype), pool
