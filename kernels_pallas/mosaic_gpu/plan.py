"""The work list of a step: what does not depend on the layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionBatch, AttentionSpec, token_rows
from kernels_pallas.mosaic_gpu.layout import NUM_SMS, prefill_layout, table_width

# A split has its own fetch of the query and its own partial result; two steps of 64 tokens make up for that.
SPLIT_TOKENS = 128
MAX_SPLITS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """tables: i32[S, W]. splits: i32[S], into how many parts a context is cut (0: padding).

    items: i32[S * max_splits, 4], the parts of all contexts in a row: sequence, part, parts, tokens of context.
    num_items: i32 scalar.
    """

    tables: jax.Array
    splits: jax.Array
    items: jax.Array
    num_items: jax.Array
    max_splits: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """tables: i32[S, W]. contexts: i32[S], tokens after this step's rows are written.

    tiles: i32[tiles, 4], longest context first: first row, sequence, position of the first row, rows. Rows count from
    the first prefill row. num_tiles: i32 scalar, how many there are; the rest is padding. valid: bool[rows].
    """

    tables: jax.Array
    contexts: jax.Array
    tiles: jax.Array
    num_tiles: jax.Array
    valid: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Plan:
    """write_page, write_offset: i32[T], where each token row's K/V goes (page of layer 0)."""

    write_page: jax.Array
    write_offset: jax.Array
    decode: DecodePlan | None
    prefill: PrefillPlan | None


def max_splits(num_seqs: int, spec: AttentionSpec, pages_per_seq: int) -> int:
    """Parts that a context may be cut into: enough to fill the device some four times over, if contexts allow."""
    wanted = -(-4 * NUM_SMS // (num_seqs * spec.num_kv_heads))
    longest = -(-pages_per_seq * spec.page_size // SPLIT_TOKENS)
    return max(1, min(max(wanted, 4), longest, MAX_SPLITS))


def plan_batch(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    seq, position, valid = token_rows(batch)
    page = jnp.where(valid, batch.block_tables[seq, position // spec.page_size], 0)
    D, width = batch.num_decode, batch.block_tables.shape[1]
    # A step may reach beyond a table's end; it finds the dummy page there.
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, table_width(spec, width) - width)))
    decode = prefill = None
    if D:
        decode = _plan_decode(tables[:D], batch.kv_lens[:D], max_splits(D, spec, width))
    if batch.num_tokens > D:
        prefill = _plan_prefill(tables[D:], batch, valid[D:], spec)
    return Plan(write_page=page, write_offset=position % spec.page_size, decode=decode, prefill=prefill)


def _plan_decode(tables, kv_lens, most: int) -> DecodePlan:
    """How a context is cut depends on its own length alone, so a row's arithmetic never depends on the others'."""
    S = kv_lens.shape[0]
    splits = jnp.clip(-(-kv_lens // SPLIT_TOKENS), 0, most).astype(jnp.int32)
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    item = jnp.arange(S * most, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, item, side="right"), S - 1).astype(jnp.int32)
    split = item - (ends - splits)[seq]
    return DecodePlan(tables=tables, splits=splits, num_items=ends[-1], max_splits=most,
                      items=jnp.stack([seq, split, splits[seq], kv_lens[seq]], axis=1))


def _plan_prefill(tables, batch: AttentionBatch, valid, spec: AttentionSpec) -> PrefillPlan:
    """Chunks are cut into tiles from their own first row; a chunk starts at a whole query block."""
    D, R = batch.num_decode, spec.query_block
    starts, lens, kv_lens = batch.query_starts[D:] - D, batch.query_lens[D:], batch.kv_lens[D:]
    rows = batch.num_tokens - D
    tile = prefill_layout(spec).tile_tokens
    # A tile begins at a whole query block, or is a part of one.
    first = jnp.arange(0, rows, min(tile, R), dtype=jnp.int32)
    chunk = jnp.maximum(jnp.sum(first[:, None] >= starts[None], axis=1, dtype=jnp.int32) - 1, 0)
    offset = first - starts[chunk]
    count = jnp.where(offset % tile == 0, jnp.clip(lens[chunk] - offset, 0, tile), 0)
    position = kv_lens[chunk] - lens[chunk] + offset
    order = jnp.argsort(jnp.where(count > 0, -(position + count), 1), stable=True)
    tiles = jnp.stack([first, chunk, position, count], axis=1)[order]
    return PrefillPlan(tables=tables, contexts=kv_lens, tiles=tiles.astype(jnp.int32), valid=valid,
                       num_tiles=jnp.sum(count > 0, dtype=jnp.int32))
