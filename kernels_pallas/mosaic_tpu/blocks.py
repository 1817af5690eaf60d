"""Block sizes for the two cases. Chosen by counting bytes and operations; no TPU was at hand to measure on.

**decode**: one query row a tile. Reading K and V is all the time there is, so steps are as long as they can be while
the next ones are on their way; three buffers, because sequences shorter than a step make every step start with the
latency of a DMA.

**prefill**: a tile of several query blocks shares one reading of the context. With R rows, G query heads on a kv head
and b bytes an element, a step does 4 R G D operations for 2 b D bytes: R G operations a byte in bfloat16. v5e does 240
in the time of reading one, v6e 560, so tiles have about 512 rows of R x G, or what a share of VMEM holds of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_tpu.layout import LANES, round_up, row_lanes, row_part, tile_rows

# Bytes of one KV buffer, and bounds of the step in tokens: matrix units want 128 at least, and scores of a step
# (rows x tokens in float32) want to stay near the registers.
_KV_BYTES = 1 << 20
KV_TOKENS = {"decode": 512, "prefill": 256}
PREFILL_ROWS = 512
_PREFILL_BYTES = 12 << 20
_MIN_KV_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """name: "decode" or "prefill". query_blocks: in a tile. rows: of one query block in the tile, all heads of a
    group. pages: of a KV step. slots: KV buffers."""

    name: str
    query_blocks: int
    rows: int
    pages: int
    slots: int

    @property
    def tile_rows(self) -> int:
        return self.query_blocks * self.rows


def _pages(name: str, spec: AttentionSpec) -> int:
    token_bytes = spec.num_kv_heads * row_lanes(spec) * jnp.dtype(spec.dtype).itemsize
    tokens = min(max(_KV_BYTES // token_bytes, _MIN_KV_TOKENS), KV_TOKENS[name])
    return max(1, tokens // spec.page_size)


def decode_case(spec: AttentionSpec) -> Case:
    group = spec.num_heads // spec.num_kv_heads
    return Case("decode", query_blocks=1, rows=round_up(group, 8), pages=_pages("decode", spec), slots=3)


def prefill_case(spec: AttentionSpec) -> Case:
    rows, slots = spec.query_block * (spec.num_heads // spec.num_kv_heads), 2
    # Of a row: buffers of queries and outputs, and in float32 the accumulator, the maximum and the sum.
    q_bytes = 4 if spec.dtype == "float32" else 2
    row_bytes = spec.num_kv_heads * (row_part(spec) * (q_bytes * (slots + 2) + 4) + 2 * 4 * LANES)
    most_rows = min(PREFILL_ROWS, _PREFILL_BYTES // row_bytes)
    # Blocks are put together by DMA, which needs each to be a whole number of hardware tiles.
    query_blocks = max(1, most_rows // rows) if rows % tile_rows(jnp.bfloat16) == 0 else 1
    return Case("prefill", query_blocks=query_blocks, rows=rows, pages=_pages("prefill", spec), slots=slots)
