"""What the kernels can do, their block sizes and their shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionSpec

# Streaming multiprocessors of an H100 SXM, H200 and GH200 (the PCIe card has 114). A constant, because programs are
# compiled without a device at hand; it only decides how finely decode work is cut.
NUM_SMS = 132

# Shared memory that one block may ask for, and what one multiprocessor has; each resident block costs 1 KiB more.
MAX_BLOCK_BYTES = 232_448
_SM_BYTES = 233_472
_RESERVED_BYTES = 1024
# Barriers, alignment of swizzled buffers, and scratch of reductions across warps.
_SLACK_BYTES = 6 * 1024

# Rows of a wgmma; one warpgroup works on 64 rows of its left operand at a time.
WGMMA_ROWS = 64
PREFILL_WARPGROUPS = 2
# wgmma could do more, but the decode kernel's output of 32 columns is not stored without bank conflicts, which jax 0.12
# refuses to compile.
_LARGEST_GROUP = 24

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")


def unsupported(spec: AttentionSpec) -> str | None:
    """What in the spec these kernels cannot do, in words; None: nothing."""
    if spec.dtype not in _DTYPES:
        return f"a KV pool of {spec.dtype} (only {' or '.join(_DTYPES)}: wgmma takes no transposed 8 bit operand)"
    if spec.head_dim not in _HEAD_DIMS:
        return f"head_dim {spec.head_dim} (only {', '.join(map(str, _HEAD_DIMS))})"
    if spec.page_size < 8 or spec.page_size & (spec.page_size - 1):
        return f"pages of {spec.page_size} tokens (only powers of two from 8 on)"
    if group_size(spec) > _LARGEST_GROUP:
        return f"{group_size(spec)} query heads a kv head (at most {_LARGEST_GROUP})"
    if spec.query_block < 8 or spec.query_block & (spec.query_block - 1):
        return f"query blocks of {spec.query_block} rows (only powers of two from 8 on)"
    return None


def group_size(spec: AttentionSpec) -> int:
    """G, query heads that share a kv head."""
    return spec.num_heads // spec.num_kv_heads


def padded_power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def pool_spec(spec: AttentionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    # K and V apart: a slice of one array that holds both would be copied. A page of one head is contiguous, which
    # is what TMA brings in one piece.
    shape = (spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)) for name in ("k", "v")}


@dataclass(frozen=True)
class KVBlocks:
    """How a context is cut into steps of `block` tokens, each brought in by `copies` copies of `rows` tokens.

    Pages larger than a block are brought in by parts.
    """

    block: int
    page_size: int

    @property
    def copies(self) -> int:
        return max(1, self.block // self.page_size)

    @property
    def rows(self) -> int:
        return min(self.block, self.page_size)


@dataclass(frozen=True)
class DecodeLayout:
    """Blocks of the decode kernel. `padded_group`: G padded to wgmma's 8 columns; `stages`: of the K/V pipeline."""

    kv: KVBlocks
    padded_group: int
    stages: int
    blocks_per_sm: int


@dataclass(frozen=True)
class PrefillLayout:
    """Blocks of the prefill kernel: each of two warpgroups has `tokens` tokens of `padded_group` heads, 64 rows."""

    kv: KVBlocks
    padded_group: int
    stages: int

    @property
    def tokens(self) -> int:
        return WGMMA_ROWS // self.padded_group

    @property
    def tile_tokens(self) -> int:
        return self.tokens * PREFILL_WARPGROUPS


def decode_layout(spec: AttentionSpec) -> DecodeLayout:
    kv = KVBlocks(WGMMA_ROWS, spec.page_size)
    group, D = -(-group_size(spec) // 8) * 8, spec.head_dim
    item = jnp.dtype(spec.dtype).itemsize
    stage = 2 * kv.block * D * item
    fixed = _SLACK_BYTES + item * group * (2 * D + kv.block) + 4 * group * (D + WGMMA_ROWS)
    # Two blocks a multiprocessor hide each other's softmax; one has to do where three stages do not fit otherwise.
    for blocks_per_sm in (2, 1):
        budget = min(MAX_BLOCK_BYTES, _SM_BYTES // blocks_per_sm - _RESERVED_BYTES)
        stages = min((budget - fixed) // stage, 6)
        if stages >= 3 or blocks_per_sm == 1:
            break
    assert stages >= 2, (spec, stages)
    return DecodeLayout(kv, group, stages, blocks_per_sm)


def prefill_layout(spec: AttentionSpec) -> PrefillLayout:
    D, item = spec.head_dim, jnp.dtype(spec.dtype).itemsize
    # An accumulator of 64 x 256 leaves no registers for scores of 128 columns.
    kv = KVBlocks(WGMMA_ROWS if D > 128 else 2 * WGMMA_ROWS, spec.page_size)
    queries = PREFILL_WARPGROUPS * WGMMA_ROWS * D * item
    stages = min((MAX_BLOCK_BYTES - _SLACK_BYTES - queries) // (2 * kv.block * D * item), 3)
    return PrefillLayout(kv, padded_power_of_two(group_size(spec)), stages)


def table_width(spec: AttentionSpec, pages_per_seq: int) -> int:
    """Block tables are widened to whole steps of both kernels."""
    pages = math.lcm(decode_layout(spec).kv.copies, prefill_layout(spec).kv.copies)
    return -(-pages_per_seq // pages) * pages
