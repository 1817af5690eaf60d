"""Second phase of the kernel: attention of query tiles over the pages of their sequences.

The steps of all tiles form one sequence, and a cursor that runs ahead of it starts their copies: while one step is
computed the pages of the next are on their way, across the border between two tiles as well. Trip counts are the true
ones: no step and no page beyond a context or before a window is touched.

Softmax is online (Milakov and Gimelshein, 2018; Dao et al., 2022), in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_tpu.blocks import Case
from kernels_pallas.mosaic_tpu.copies import Group, Visit, start, wait
from kernels_pallas.mosaic_tpu.layout import LANES, row_lanes, row_part, scale_lanes, whole_rows
from kernels_pallas.mosaic_tpu.plan import Tiles

# A running maximum starts above what masked scores are set to: then exp(masked - maximum) is 0 even in a step
# where a row sees nothing.
_MASKED = -1e30
LOWEST = -1e20


class Cursor(NamedTuple):
    """The next step whose copies are to be started."""

    tile: jax.Array
    step: jax.Array


def attend_scratch(case: Case, q_dtype, out_dtype, spec: AttentionSpec) -> dict:
    K, width, kv_tokens = spec.num_kv_heads, row_part(spec), case.pages * spec.page_size
    return {
        "q": pltpu.VMEM((case.slots, K, case.tile_rows, width), q_dtype),
        "kv": pltpu.VMEM((case.slots, K, kv_tokens, row_lanes(spec)), jnp.dtype(spec.dtype)),
        "out": pltpu.VMEM((2, K, case.tile_rows, width), out_dtype),
        # Maximum and sum of each row, repeated over the lanes: so they meet scores without a shuffle.
        "top": pltpu.VMEM((K, case.tile_rows, LANES), jnp.float32),
        "total": pltpu.VMEM((K, case.tile_rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((K, case.tile_rows, width), jnp.float32),
        "q_arrived": pltpu.SemaphoreType.DMA((case.slots,)),
        "kv_arrived": pltpu.SemaphoreType.DMA((case.slots,)),
        **({"scales": pltpu.VMEM((case.slots, case.pages, K, scale_lanes(spec)), jnp.float32)}
           if spec.quantized else {}),
        "out_left": pltpu.SemaphoreType.DMA((2,)),
    }


def _over_lanes(x: jax.Array, width: int) -> jax.Array:
    """[rows, 128] of equal lanes -> [rows, width]."""
    if width % LANES == 0:
        return jnp.concatenate([x] * (width // LANES), axis=1)
    return jnp.broadcast_to(x[:, :1], (x.shape[0], width))


def attend(case: Case, tiles: Tiles, tables, q, pool: dict, sinks, out, base: jax.Array, window: jax.Array | None,
           scratch: dict, spec: AttentionSpec) -> None:
    """Attention of all tiles of one case.

    q, out: [blocks, K, rows, Dq] and the pool in HBM, `base` the layer's first page; tables i32 in scalar memory;
    sinks f32[K, tile_rows, 128] in VMEM or None.
    """
    N, D, K = spec.page_size, spec.head_dim, spec.num_kv_heads
    group = spec.num_heads // K
    kv_tokens = case.pages * N
    count = tiles.count[0]
    # float32 operands want all their bits; 16 and 8 bit pools are multiplied in bfloat16, exactly.
    exact = q.dtype == jnp.float32 or pool["kv"].dtype == jnp.float32
    operand = jnp.float32 if exact else jnp.bfloat16
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT

    def first_page(tile):
        if window is None:
            return jnp.int32(0)
        return jnp.maximum(tiles.start[tile] - window + 1, 0) // N

    def num_steps(tile):
        return pl.cdiv(pl.cdiv(tiles.end[tile], N) - first_page(tile), case.pages)

    # -- copies

    def each_block(tile, visit_block) -> None:
        """visit_block(number in the tile, query block)."""
        height = tiles.end[tile] - tiles.start[tile]
        blocks = pl.cdiv(height, spec.query_block) if case.query_blocks > 1 else 1

        @pl.loop(0, blocks)
        def _(i):
            visit_block(i, tiles.block[tile] + i)

    def rows_of(i):
        return pl.ds(pl.multiple_of(i * case.rows, case.rows), case.rows)

    def q_in(tile) -> Group:
        slot = tile % case.slots

        def visit(copy: Visit) -> None:
            each_block(tile, lambda i, block: copy(
                q.at[block], scratch["q"].at[slot, :, rows_of(i), :], scratch["q_arrived"].at[slot]))
        return visit

    def kv_in(tile, step, slot) -> Group:
        def visit(copy: Visit) -> None:
            first = first_page(tile) + step * case.pages
            table = tiles.table[tile] + first

            @pl.loop(0, jnp.minimum(case.pages, pl.cdiv(tiles.end[tile], N) - first))
            def _(i):
                rows = pl.ds(pl.multiple_of(i * N, N), N)
                page, arrived = base + tables[table + i], scratch["kv_arrived"].at[slot]
                copy(pool["kv"].at[page], scratch["kv"].at[slot, :, rows, :], arrived)
                if spec.quantized:
                    copy(pool["scales"].at[page], scratch["scales"].at[slot, i], arrived)
        return visit

    def out_back(tile) -> Group:
        slot = tile % 2

        def visit(copy: Visit) -> None:
            each_block(tile, lambda i, block: copy(
                scratch["out"].at[slot, :, rows_of(i), :], out.at[block], scratch["out_left"].at[slot]))
        return visit

    def run_ahead(cursor: Cursor, slot) -> Cursor:
        """Starts the copies of the cursor's step, if there is one, and returns the step after it."""
        tile, step = cursor
        real = tile < count

        @pl.when(real & (step == 0))
        def _():
            start(q_in(tile))

        @pl.when(real)
        def _():
            start(kv_in(tile, step, slot))

        last = step + 1 >= num_steps(jnp.minimum(tile, count - 1))
        return Cursor(jnp.where(last, tile + 1, tile), jnp.where(last, 0, step + 1))

    # -- arithmetic

    def clean(tile, step, slot) -> None:
        """Rows behind the context may hold anything, NaN included, and 0 * NaN is NaN."""
        written = tiles.end[tile] - (first_page(tile) + step * case.pages) * N
        for head in range(K):
            kv = scratch["kv"][slot, head]
            row = lax.broadcasted_iota(jnp.int32, kv.shape, 0)
            scratch["kv"][slot, head] = jnp.where(row < written, kv, jnp.zeros_like(kv))

    def scale_rows(slot, part: int) -> jax.Array:
        """f32[K, tokens] of the step's keys (part 0) or values (part 1)."""
        return jnp.concatenate([scratch["scales"][slot, page][:, part * N:(part + 1) * N]
                                for page in range(case.pages)], axis=1)

    def compute(tile, step, slot) -> None:
        shape = (case.tile_rows, kv_tokens)
        at = (first_page(tile) + step * case.pages) * N + lax.broadcasted_iota(jnp.int32, shape, 1)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        if group > 1:  # vectors of integers cannot be divided; the quotient of a half is never near an integer
            row = jnp.floor((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)
        position = tiles.start[tile] + row
        seen = at <= position
        if window is not None:
            seen &= at > position - window

        if spec.quantized:
            key_scales, value_scales = scale_rows(slot, 0), scale_rows(slot, 1)
        for head in range(K):
            queries = scratch["q"][tile % case.slots, head].astype(operand)                 # [rows, Dq]
            kv = scratch["kv"][slot, head].astype(operand)                                  # [tokens, row_lanes]
            keys, values = (kv, kv) if whole_rows(spec) else (kv[:, :D], kv[:, D:])
            scores = lax.dot_general(queries, keys, (((1,), (1,)), ((), ())), precision=precision,
                                     preferred_element_type=jnp.float32) * spec.scale
            if spec.quantized:
                scores = scores * key_scales[head:head + 1]
            if spec.softcap is not None:
                scores = spec.softcap * jnp.tanh(scores * (1.0 / spec.softcap))
            scores = jnp.where(seen, scores, _MASKED)
            top = scratch["top"][head]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))              # [rows, 128]
            weights = jnp.exp(scores - _over_lanes(new_top, kv_tokens))
            keep = jnp.exp(top - new_top)
            total = jnp.sum(weights, axis=1, keepdims=True)
            if spec.quantized:  # scales of unwritten rows may be NaN
                weights = jnp.where(seen, weights * value_scales[head:head + 1], 0.0)
            update = lax.dot_general(weights.astype(operand), values, (((1,), (0,)), ((), ())), precision=precision,
                                     preferred_element_type=jnp.float32)
            scratch["top"][head] = new_top
            scratch["total"][head] = scratch["total"][head] * keep + total
            scratch["acc"][head] = scratch["acc"][head] * _over_lanes(keep, update.shape[1]) + update

    # -- the loop over tiles and their steps

    def run_tile(tile, carry):
        if sinks is None:
            scratch["top"][...] = jnp.full_like(scratch["top"], LOWEST)
            scratch["total"][...] = jnp.zeros_like(scratch["total"])
        else:  # a sink is a score without a value
            scratch["top"][...] = sinks[...]
            scratch["total"][...] = jnp.ones_like(scratch["total"])
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        wait(q_in(tile))
        steps = num_steps(tile)

        def run_step(step, carry):
            done, cursor = carry
            cursor = run_ahead(cursor, (done + case.slots - 1) % case.slots)
            slot = done % case.slots
            wait(kv_in(tile, step, slot))

            @pl.when(step == steps - 1)
            def _():
                clean(tile, step, slot)

            compute(tile, step, slot)
            return done + 1, cursor

        carry = lax.fori_loop(0, steps, run_step, carry)

        @pl.when(tile >= 2)
        def _():
            wait(out_back(tile - 2))
        for head in range(K):
            total = _over_lanes(scratch["total"][head], row_part(spec))
            scratch["out"][tile % 2, head] = (scratch["acc"][head] / total).astype(out.dtype)
        start(out_back(tile))
        return carry

    @pl.when(count > 0)
    def _():
        cursor = Cursor(jnp.int32(0), jnp.int32(0))
        for slot in range(case.slots - 1):
            cursor = run_ahead(cursor, slot)
        lax.fori_loop(0, count, run_tile, (jnp.int32(0), cursor))

        @pl.loop(jnp.maximum(count - 2, 0), count)
        def _(tile):
            wait(out_back(tile))
