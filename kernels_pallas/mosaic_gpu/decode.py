"""Decode: one query row a sequence, split-K over its pages (flash decoding, Dao et al., 2023).

A decode row reads K and V once and does little with them, so all that counts is to keep memory busy. The group of
query heads that share a kv head is too small for the 64 rows of wgmma, so the products are turned round: the scores
are K Q^T, [64 tokens, group], and the output V^T P^T, [head_dim, group], with the group in the 8 or more columns.

Blocks are persistent: block b works on parts b, b + blocks, ... of the list (part of a context, kv head). One
warpgroup copies, up to `stages` steps ahead and across the border of parts; the other computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import _compat
from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_gpu import warpgroup as wg
from kernels_pallas.mosaic_gpu.layout import NUM_SMS, WGMMA_ROWS, decode_layout
from kernels_pallas.mosaic_gpu.plan import DecodePlan

# Below the output's head_dim rows come the maximum and the sum of the softmax, and padding to whole TMA tiles.
STATS_ROWS = 8
_QUERY_SLOTS = 2


def decode_partials(q: jax.Array, pool, plan: DecodePlan, base: jax.Array, window: jax.Array | None,
                    spec: AttentionSpec) -> jax.Array:
    """The softmax of each part of each context.

    Args:
        q: [S, K, G, D] of the pool's dtype.
        base: i32 scalar, the layer's first page.

    Returns:
        f32[S, max_splits, K, D + STATS_ROWS, padded G]: along the fourth axis the unnormalised output, then the
        maximum (of scores times log2 e), then the sum. Parts that a context does not have are left undefined.
    """
    layout = decode_layout(spec)
    S, K, group, D = q.shape
    G, kv = layout.padded_group, layout.kv
    q = jnp.pad(q, ((0, 0), (0, 0), (0, G - group), (0, 0)))
    blocks = _compat.GPU_INTERPRETED_BLOCKS if wg.is_interpreted() else NUM_SMS * layout.blocks_per_sm
    blocks = min(blocks, S * plan.max_splits * K)
    unlimited = jnp.int32(2**30)
    scalars = jnp.stack([plan.num_items * K, base, unlimited if window is None else window]).astype(jnp.int32)

    def body(q_ref, k_ref, v_ref, tables, items, scalars, out_ref, q_smem, k_smem, v_smem, p_smem, out_smem,
             q_ready, k_ready, v_ready, v_fetched, q_free, k_free, v_free):
        keys = wg.Pipeline(k_ref, k_smem, k_ready, k_free, kv)
        values = wg.Pipeline(v_ref, v_smem, v_ready, v_free, kv)
        block = lax.axis_index("block")
        num_units, base, window = scalars[0], scalars[1], scalars[2]
        num_mine = wg.cdiv(num_units - block, blocks)

        def unit(i):
            """(sequence, kv head, place in the output, context, first step, end of steps)."""
            at = block + i * blocks
            item, head = lax.div(at, jnp.int32(K)), lax.rem(at, jnp.int32(K))
            seq, split, splits, context = (items[item, field] for field in range(4))
            begin, end = lax.div(jnp.maximum(context - window, 0), jnp.int32(kv.block)), wg.cdiv(context, kv.block)
            share = lax.div(end - begin + splits - 1, splits)
            first = jnp.minimum(begin + split * share, end)
            return seq, head, seq * plan.max_splits + split, context, first, jnp.minimum(first + share, end)

        @pl.when(lax.axis_index("wg") == 0)
        def _compute():
            def run_unit(i, count):
                _, head, place, context, first, end = unit(i)
                q_slot = lax.rem(i, jnp.int32(_QUERY_SLOTS))
                plgpu.barrier_wait(q_ready.at[q_slot])

                def step(at, carry):
                    acc, total, top, count = carry          # [D, G], [tokens, G], [G]
                    slot = keys.slot(count)
                    plgpu.barrier_wait(k_ready.at[slot])
                    scores = wg.matmul_t(k_smem.at[slot], q_smem.at[q_slot])
                    plgpu.barrier_arrive(k_free.at[slot])
                    if spec.softcap is None:
                        scores *= spec.scale * wg.LOG2_E
                    else:
                        scores = wg.softcapped(scores * spec.scale, spec.softcap) * wg.LOG2_E
                    token = at * kv.block + wg.iota(scores.shape, 0)
                    scores = jnp.where((token < context) & (token >= context - window), scores, wg.MASKED)
                    new_top = jnp.maximum(top, scores.max(axis=0))
                    weights = jnp.exp2(scores - wg.along_columns(new_top, scores.shape))
                    keep = jnp.exp2(top - new_top)
                    # Summed over tokens only at the end: that crosses warps.
                    total = total * wg.along_columns(keep, total.shape) + weights
                    wg.store_transposed(p_smem, weights.astype(p_smem.dtype))
                    plgpu.barrier_wait(v_ready.at[slot])
                    plgpu.commit_smem()
                    acc = wg.add_t_matmul_t(acc * wg.along_columns(keep, acc.shape), v_smem.at[slot], p_smem)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, total, new_top, count + 1

                start = (wg.full((D, G), 0, wg.ROWS_AND_COLUMNS), wg.full((kv.block, G), 0, wg.ROWS_AND_COLUMNS),
                         wg.full((G,), wg.LOWEST, wg.COLUMNS), count)
                acc, total, top, count = lax.fori_loop(first, end, step, start)
                plgpu.barrier_arrive(q_free.at[q_slot])

                total = total.sum(axis=0)
                stats = (WGMMA_ROWS, G)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)    # of the unit before
                out_smem[pl.ds(0, D)] = acc
                out_smem[pl.ds(D, WGMMA_ROWS)] = jnp.where(
                    wg.iota(stats, 0) == 0, wg.along_columns(top, stats), wg.along_columns(total, stats))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, D + STATS_ROWS)], out_ref.at[place, head])
                return count

            lax.fori_loop(0, num_mine, run_unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("wg") == 1)
        def _copy():
            def run_unit(i, count):
                seq, head, _, context, first, end = unit(i)
                q_slot = lax.rem(i, jnp.int32(_QUERY_SLOTS))
                pl.when(i >= _QUERY_SLOTS)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[seq, head], q_smem.at[q_slot], q_ready.at[q_slot])

                def step(at, count):
                    ids = wg.page_ids(tables, seq, at, kv, base)
                    keys.fetch(count, head, ids, at)
                    values.fetch_cleaned(count, head, ids, at, context, v_fetched)
                    return count + 1

                return lax.fori_loop(first, end, step, count)

            count = lax.fori_loop(0, num_mine, run_unit, jnp.int32(0))
            wg.wait_for_last(q_free, num_mine, _QUERY_SLOTS)
            keys.drain(count)
            values.drain(count)

    dtype, stages = q.dtype, layout.stages
    kv_ready = plgpu.Barrier(num_arrivals=kv.copies, num_barriers=stages)
    partials = wg.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((S * plan.max_splits, K, D + STATS_ROWS, G), jnp.float32),
        scratch_types=[
            wg.operand((_QUERY_SLOTS, G, D), dtype), wg.operand((stages, kv.block, D), dtype),
            wg.operand((stages, kv.block, D), dtype), wg.operand((G, kv.block), dtype),
            plgpu.SMEM((D + WGMMA_ROWS, G), jnp.float32),
            plgpu.Barrier(num_barriers=_QUERY_SLOTS), kv_ready, kv_ready, plgpu.Barrier(num_arrivals=kv.copies),
            plgpu.Barrier(num_barriers=_QUERY_SLOTS), plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages)],
        grid=blocks, num_threads=2,
    )(q, pool["k"], pool["v"], plan.tables, plan.items, scalars)
    return partials.reshape(S, plan.max_splits, K, D + STATS_ROWS, G)
