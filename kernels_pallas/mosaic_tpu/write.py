"""First phase of the kernel: this call's K and V rows go into their pages.

A DMA moves whole hardware tiles of a page, so a piece of `write_rows` tokens is read, gets its new rows and is written
back; a piece that is new from top to bottom is not read. A ring of buffers keeps pieces on their way in and out while
one is being changed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_tpu.copies import Group, Visit, start, wait
from kernels_pallas.mosaic_tpu.layout import row_lanes, scale_lanes, write_rows
from kernels_pallas.mosaic_tpu.plan import Writes

# Pieces in flight: half of them on their way in, half on their way out.
_SLOTS = 8
_AHEAD = _SLOTS // 2


def write_scratch(spec: AttentionSpec) -> dict:
    B, K, width = write_rows(spec), spec.num_kv_heads, row_lanes(spec)
    scratch = {
        "pieces": pltpu.VMEM((_SLOTS, K, B, width), jnp.dtype(spec.dtype)),
        "rows": pltpu.VMEM((_SLOTS, B, K, width), jnp.float32),
        "arrived": pltpu.SemaphoreType.DMA((_SLOTS,)),
        "written": pltpu.SemaphoreType.DMA((_SLOTS,)),
    }
    if spec.quantized:
        scales = pltpu.VMEM((_SLOTS, K, scale_lanes(spec)), jnp.float32)
        scratch |= {"scales": scales, "new_scales": scales}
    return scratch


def write_pages(writes: Writes, rows, scales, pool: dict, base: jax.Array, scratch: dict, spec: AttentionSpec) -> None:
    """Returns when all pages are written.

    rows f32[T, K, row_lanes], scales f32[U, K, scale_lanes] (None: not quantised) and the pool in HBM; `base` is the
    layer's first page.
    """
    B, N = write_rows(spec), spec.page_size
    count = writes.count[0]

    def piece_in_pool(u):
        offset = pl.multiple_of(writes.offset[u], B)
        return pool["kv"].at[base + writes.page[u], :, pl.ds(offset, B), :]

    def scales_in_pool(u):
        return pool["scales"].at[base + writes.page[u]]

    def arriving(u) -> Group:
        def visit(copy: Visit) -> None:
            slot = u % _SLOTS
            arrived = scratch["arrived"].at[slot]
            source, first, last = writes.source[u], writes.first[u], writes.last[u]
            whole = last - first == B
            if spec.quantized:
                copy(scales.at[u], scratch["new_scales"].at[slot], arrived)
                copy(scales_in_pool(u), scratch["scales"].at[slot], arrived)

            @pl.when(whole)
            def _():
                copy(rows.at[pl.ds(source, B)], scratch["rows"].at[slot], arrived)

            @pl.when(~whole)
            def _():
                copy(piece_in_pool(u), scratch["pieces"].at[slot], arrived)

                @pl.loop(first, last)
                def _(i):
                    copy(rows.at[source + i], scratch["rows"].at[slot, i], arrived)
        return visit

    def leaving(u) -> Group:
        def visit(copy: Visit) -> None:
            slot = u % _SLOTS
            copy(scratch["pieces"].at[slot], piece_in_pool(u), scratch["written"].at[slot])
            if spec.quantized:
                copy(scratch["scales"].at[slot], scales_in_pool(u), scratch["written"].at[slot])
        return visit

    @pl.loop(0, jnp.minimum(_AHEAD, count))
    def _(u):
        start(arriving(u))

    @pl.loop(0, count)
    def _(u):
        ahead = u + _AHEAD

        @pl.when(ahead < count)
        def _():
            @pl.when(ahead >= _SLOTS)
            def _():
                wait(leaving(ahead - _SLOTS))
            start(arriving(ahead))

        wait(arriving(u))
        slot = u % _SLOTS
        first, last = writes.first[u], writes.last[u]
        row = lax.broadcasted_iota(jnp.int32, (B, row_lanes(spec)), 0)

        def merge(new_rows) -> None:
            """new_rows(head): what the head's rows become where they are new, [B, lanes] or [1, lanes]."""
            for head in range(spec.num_kv_heads):
                old = scratch["pieces"][slot, head].astype(jnp.float32)
                merged = jnp.where((row >= first) & (row < last), new_rows(head), old)
                scratch["pieces"][slot, head] = merged.astype(spec.dtype)

        # One row, as of every decode row, goes everywhere and is kept where it belongs; to collect a head's part of
        # many rows costs a shuffle for each of them.
        @pl.when(last - first == 1)
        def _():
            rows = scratch["rows"][slot, first]
            merge(lambda head: rows[head:head + 1])

        @pl.when(last - first > 1)
        def _():
            merge(lambda head: scratch["rows"][slot, :, head, :])

        if spec.quantized:
            lane = lax.broadcasted_iota(jnp.int32, (spec.num_kv_heads, scale_lanes(spec)), 1)
            lane = jnp.where(lane < N, lane, lane - N)  # padding stays beyond N
            new = (lane >= first) & (lane < last)
            scratch["scales"][slot] = jnp.where(new, scratch["new_scales"][slot], scratch["scales"][slot])
        start(leaving(u))

    @pl.loop(jnp.maximum(count - _SLOTS, 0), count)
    def _(u):
        wait(leaving(u))
