"""What does not depend on the layer: which query tiles attend to what, and which pieces of pages are written."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionBatch, AttentionSpec, token_rows
from kernels_pallas.mosaic_tpu.blocks import prefill_case
from kernels_pallas.mosaic_tpu.layout import write_rows

# A TPU core's scalar memory. What the compiler itself puts there was below 16 KiB wherever it was looked at.
SMEM_BYTES = 1 << 20
_SMEM_RESERVED = 1 << 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Query tiles: some consecutive query blocks of one sequence. The first `count` are real.

    table: i32[I], where the sequence's page ids start in `Plan.tables`. block: i32[I], first query block.
    start, end: i32[I], positions of the first row and behind the last one. count: i32[1].
    """

    table: jax.Array
    block: jax.Array
    start: jax.Array
    end: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Writes:
    """Aligned pieces of pages that get new rows; each is written by one sequence. The first `count` are real.

    page, offset: i32[U], page id and the piece's first row in the page. source: i32[U], the token row that belongs to
    the piece's row 0 (if that were new). first, last: i32[U], new are the piece's rows first .. last - 1.
    count: i32[1].
    """

    page: jax.Array
    offset: jax.Array
    source: jax.Array
    first: jax.Array
    last: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """tables: i32[S * pages_per_seq], the block tables in one row. valid: bool[T], rows that are not padding."""

    tables: jax.Array
    decode: Tiles | None
    prefill: Tiles | None
    writes: Writes
    valid: jax.Array


def _kept(keep: jax.Array, **columns: jax.Array) -> dict[str, jax.Array]:
    """Columns with the rows to keep in front, in order, and their count."""
    order = jnp.argsort(~keep, stable=True)
    kept = {name: jnp.where(keep, column, 0)[order].astype(jnp.int32) for name, column in columns.items()}
    return {**kept, "count": jnp.sum(keep, dtype=jnp.int32)[None]}


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    """Raises ValueError when the integers of a batch of this shape do not fit a TPU core's scalar memory."""
    S, pages_per_seq = batch.block_tables.shape
    D, N, R, B = batch.num_decode, spec.page_size, spec.query_block, write_rows(spec)
    seq, position, valid = token_rows(batch)

    def page_of(seq, position):
        return batch.block_tables[seq, jnp.minimum(position // N, pages_per_seq - 1)]

    decode = prefill = None
    writes = []
    if D:
        row, at = jnp.arange(D), position[:D]
        decode = Tiles(**_kept(valid[:D], table=row * pages_per_seq, block=row, start=at, end=at + 1))
        writes.append((valid[:D], page_of(row, at), at % N // B * B, row - at % B, at % B, at % B + 1))
    if batch.num_tokens > D:
        # Of each query block's first row: it is real if any of the block is.
        row, chunk, at, real = jnp.arange(D, batch.num_tokens, R), seq[D::R], position[D::R], valid[D::R]
        kv_end = batch.kv_lens[chunk]
        chunk_row = row - batch.query_starts[chunk]
        height = prefill_case(spec).query_blocks * R
        prefill = Tiles(**_kept(real & (chunk_row % height == 0), table=chunk * pages_per_seq,
                                block=jnp.arange(row.size), start=at, end=jnp.minimum(at + height, kv_end)))
        # A piece that two query blocks share belongs to the one that holds its first new row.
        piece = (at // B)[:, None] + jnp.arange(-(-R // B) + 1)                             # [blocks, pieces]
        chunk, at, kv_end, real = chunk[:, None], at[:, None], kv_end[:, None], real[:, None]
        chunk_start = at - chunk_row[:, None]
        first = jnp.maximum(piece * B, chunk_start)
        owned = real & (at <= first) & (first < jnp.minimum(at + R, kv_end))
        source = row[:, None] + piece * B - at
        last = jnp.minimum((piece + 1) * B, kv_end)
        writes.append(tuple(x.reshape(-1) for x in (owned, page_of(chunk, piece * B), piece * B % N, source,
                                                    first - piece * B, last - piece * B)))
    owned, page, offset, source, first, last = (jnp.concatenate(column) for column in zip(*writes))
    plan = Plan(tables=batch.block_tables.reshape(-1), decode=decode, prefill=prefill, valid=valid,
                writes=Writes(**_kept(owned, page=page, offset=offset, source=source, first=first, last=last)))
    _check_scalar_memory(plan, S, pages_per_seq, spec)
    return plan


def scalars(plan: Plan) -> tuple:
    """The part of a plan that the kernel reads from scalar memory."""
    return plan.tables, plan.decode, plan.prefill, plan.writes


def _check_scalar_memory(plan: Plan, num_seqs: int, pages_per_seq: int, spec: AttentionSpec) -> None:
    need = sum(4 * leaf.size for leaf in jax.tree.leaves(scalars(plan)))
    room = SMEM_BYTES - _SMEM_RESERVED
    if need > room:
        raise ValueError(
            f"block tables of {num_seqs} sequences x {pages_per_seq} pages and the plan of this batch take {need} "
            f"bytes, but a TPU core's scalar memory has room for {room}: use larger pages (page_size is "
            f"{spec.page_size}), fewer sequences, or a shorter maximum length")
