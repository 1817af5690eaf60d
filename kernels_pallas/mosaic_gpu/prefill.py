"""Prefill: warp-specialised flash attention (Shah et al., 2024) over pages.

The query heads that share a kv head are rows of one tile, so that K and V are read once for all of them: row r of a
tile is token r // G, head r % G, with G padded to a power of two. One warpgroup copies pages, two compute, on 64 rows
each, and take turns: while one multiplies, the other has its softmax.

Blocks are persistent: block b works on units b, b + blocks, ... of the list (tile, kv head), longest context first.
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
from kernels_pallas.mosaic_gpu.layout import NUM_SMS, PREFILL_WARPGROUPS, WGMMA_ROWS, prefill_layout
from kernels_pallas.mosaic_gpu.plan import PrefillPlan


def _registers(head_dim: int) -> tuple[int, int]:
    """Of a thread that computes and of one that copies: no spills with ptxas 12.9 and 13, jax 0.10.2 to 0.12.0.1.

    They share what the three warpgroups are launched with, 168 each; to wait for more would be to wait for ever.
    """
    compute, copy = (232, 40) if head_dim > 128 else (224, 56)
    assert PREFILL_WARPGROUPS * compute + copy <= (PREFILL_WARPGROUPS + 1) * 168
    return compute, copy


def prefill(q: jax.Array, pool, plan: PrefillPlan, base: jax.Array, window: jax.Array | None,
            sinks: jax.Array | None, spec: AttentionSpec) -> jax.Array:
    """Causal attention of the chunks' rows.

    Args:
        q: [R, K, G, D] of the pool's dtype, R rows in whole query blocks.
        base: i32 scalar, the layer's first page.
        sinks: f32[K, G] or None.

    Returns:
        [R, K, G, D] of q's dtype; rows of padding are zero.
    """
    layout = prefill_layout(spec)
    R, K, group, D = q.shape
    G, kv, dtype, rows = layout.padded_group, layout.kv, q.dtype, WGMMA_ROWS
    q = jnp.pad(q, ((0, layout.tile_tokens), (0, 0), (0, G - group), (0, 0)))
    q = q.transpose(1, 0, 2, 3).reshape(K, -1, D)
    units = plan.tiles.shape[0] * K
    blocks = min(_compat.GPU_INTERPRETED_BLOCKS if wg.is_interpreted() else NUM_SMS, units)
    scalars = jnp.stack([plan.num_tiles * K, base, jnp.int32(0) if window is None else window]).astype(jnp.int32)
    inputs = [q, pool["k"], pool["v"], plan.tables, plan.contexts, plan.tiles, scalars]
    if sinks is not None:
        padded = jnp.pad(sinks * wg.LOG2_E, ((0, 0), (0, G - group)))
        inputs.append(jnp.tile(padded, (1, rows // G)))                              # [K, rows]

    compute_registers, copy_registers = _registers(D)

    # A chunk owns whole query blocks of rows, so this many rows of a tile belong to one chunk, or to none.
    stored_rows = min(spec.query_block * G, rows)

    def body(q_ref, k_ref, v_ref, tables, contexts, tiles, scalars, *refs):
        sinks_ref, refs = (refs[0], refs[1:]) if sinks is not None else (None, refs)
        (out_ref, q_smem, k_smem, v_smem, sinks_smem, q_ready, k_ready, v_ready, v_fetched, k_free, v_free, turn) = refs
        keys = wg.Pipeline(k_ref, k_smem, k_ready, k_free, kv)
        values = wg.Pipeline(v_ref, v_smem, v_ready, v_free, kv)
        me = lax.axis_index("wg")

        def for_each_unit(run_unit):
            """run_unit(i, steps so far) -> steps so far. Read by each branch for itself: what is live where the
            registers are shared out anew is spilled."""
            return lax.fori_loop(0, wg.cdiv(scalars[0] - lax.axis_index("block"), blocks), run_unit, jnp.int32(0))

        def unit(i, window_size):
            """(first row, sequence, kv head, position of the first row, rows, first step, end of steps)."""
            at = lax.axis_index("block") + i * blocks
            tile, head = lax.div(at, jnp.int32(K)), lax.rem(at, jnp.int32(K))
            first, seq, position, count = (tiles[tile, field] for field in range(4))
            begin = jnp.int32(0)
            if window is not None:
                begin = lax.div(jnp.maximum(position - window_size + 1, 0), jnp.int32(kv.block))
            return first, seq, head, position, count, begin, wg.cdiv(position + count, kv.block)

        def compute():
            plgpu.set_max_registers(compute_registers, action="increase")
            window_size = scalars[2]
            q_mine = q_smem.at[me]

            def take_turn():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def tokens(shape, axis=0):
                """Token of the tile that each row stands for."""
                return lax.shift_right_logical(me * rows + wg.iota(shape, axis), G.bit_length() - 1)

            def run_unit(i, step_count):
                first, _, head, position, count, begin, end = unit(i, window_size)
                my_rows = pl.ds(first * G + me * rows, rows)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)      # of the tile before
                plgpu.copy_gmem_to_smem(q_ref.at[head, my_rows], q_mine, q_ready.at[me])
                if sinks_ref is not None:
                    plgpu.copy_gmem_to_smem(sinks_ref.at[head], sinks_smem.at[me], q_ready.at[me])
                plgpu.barrier_wait(q_ready.at[me])
                pl.when(me == 1)(take_turn)

                def step(at, carry, masked: bool):
                    acc, total, top, step_count = carry              # [rows, D], [rows], [rows]
                    slot = keys.slot(step_count)
                    plgpu.barrier_wait(k_ready.at[slot])
                    scores = wg.matmul_t(q_mine, k_smem.at[slot], meanwhile=take_turn)
                    plgpu.barrier_arrive(k_free.at[slot])
                    factor = spec.scale * wg.LOG2_E
                    if spec.softcap is not None:
                        scores, factor = wg.softcapped(scores * spec.scale, spec.softcap), wg.LOG2_E
                    if masked:
                        token = at * kv.block + wg.iota(scores.shape, 1)
                        mine = position + tokens(scores.shape)
                        seen = token <= mine
                        if window is not None:
                            seen &= token > mine - window_size
                        scores = jnp.where(seen, scores, wg.MASKED)
                    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
                    keep = jnp.exp2(top - new_top)
                    weights = jnp.exp2(scores * factor - wg.along_rows(new_top, scores.shape))
                    total = total * keep + weights.sum(axis=1)
                    acc = acc * wg.along_rows(keep, acc.shape)
                    acc, total, new_top, weights = lax.optimization_barrier(
                        (acc, total, new_top, weights.astype(dtype)))
                    plgpu.barrier_arrive(turn)
                    plgpu.barrier_wait(v_ready.at[slot])
                    plgpu.barrier_wait(turn)
                    acc = wg.add_matmul(acc, weights, v_smem.at[slot])
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, total, new_top, step_count + 1

                top, total = wg.full((rows,), wg.LOWEST, wg.ROWS), wg.full((rows,), 0, wg.ROWS)
                if sinks_ref is not None:    # a first key, whose value is zero
                    top, total = wg.laid_out(sinks_smem[me], wg.ROWS), wg.full((rows,), 1, wg.ROWS)
                carry = wg.full((rows, D), 0, wg.ROWS_AND_COLUMNS), total, top, step_count
                # First steps that a window cuts into, then those that all rows see whole, then those that the
                # diagonal or the end of the context cuts into.
                whole = begin
                if window is not None:
                    whole = wg.cdiv(jnp.maximum(position + count - window_size, 0), kv.block)
                    whole = jnp.minimum(whole, end)
                    carry = lax.fori_loop(begin, whole, lambda at, c: step(at, c, True), carry)
                cut = jnp.maximum(lax.div(position + 1, jnp.int32(kv.block)), whole)
                carry = lax.fori_loop(whole, cut, lambda at, c: step(at, c, False), carry)
                acc, total, _, step_count = lax.fori_loop(cut, end, lambda at, c: step(at, c, True), carry)
                pl.when(me == 0)(take_turn)

                # Rows without a token, and what has no key but NaN in its query, must not come out as NaN.
                acc = acc * wg.along_rows(1 / jnp.maximum(total, 1e-30), acc.shape)
                q_mine[...] = jnp.where(tokens(acc.shape) < count, acc, 0.0).astype(dtype)
                plgpu.commit_smem()
                for begin_row in range(0, rows, stored_rows):
                    begin_token = lax.div(me * rows + begin_row, jnp.int32(G))

                    @pl.when(begin_token < count)
                    def _store(begin_row=begin_row):
                        at = pl.ds(first * G + me * rows + begin_row, stored_rows)
                        plgpu.copy_smem_to_gmem(q_mine.at[pl.ds(begin_row, stored_rows)], out_ref.at[head, at])
                return step_count

            for_each_unit(run_unit)
            plgpu.wait_smem_to_gmem(0)

        def copy():
            plgpu.set_max_registers(copy_registers, action="decrease")
            base, window_size = scalars[1], scalars[2]

            def run_unit(i, step_count):
                _, seq, head, _, _, begin, end = unit(i, window_size)
                context = contexts[seq]

                def step(at, step_count):
                    ids = wg.page_ids(tables, seq, at, kv, base)
                    keys.fetch(step_count, head, ids, at)
                    values.fetch_cleaned(step_count, head, ids, at, context, v_fetched)
                    return step_count + 1

                return lax.fori_loop(begin, end, step, step_count)

            step_count = for_each_unit(run_unit)
            keys.drain(step_count)
            values.drain(step_count)

        pl.when(me < PREFILL_WARPGROUPS)(compute)
        pl.when(me == PREFILL_WARPGROUPS)(copy)

    stages = layout.stages
    ready = plgpu.Barrier(num_arrivals=kv.copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=PREFILL_WARPGROUPS, num_barriers=stages)
    out = wg.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            wg.operand((PREFILL_WARPGROUPS, rows, D), dtype), wg.operand((stages, kv.block, D), dtype),
            wg.operand((stages, kv.block, D), dtype), plgpu.SMEM((PREFILL_WARPGROUPS, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=1 if sinks is None else 2, num_barriers=PREFILL_WARPGROUPS),
            ready, ready, plgpu.Barrier(num_arrivals=kv.copies), free, free,
            plgpu.Barrier(num_arrivals=PREFILL_WARPGROUPS)],
        grid=blocks, num_threads=PREFILL_WARPGROUPS + 1,
    )(*inputs)
    out = out.reshape(K, -1, G, D)[:, :R, :group].transpose(1, 0, 2, 3)
    # Rows of query blocks that no chunk owns were not written at all.
    return jnp.where(plan.valid[:, None, None, None], out, 0)
