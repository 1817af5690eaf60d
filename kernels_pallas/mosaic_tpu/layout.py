"""How the TPU kernel wants its arrays.

A page is `[K, N, row_lanes]`: for each kv head the rows of its tokens, a token's key and value side by side in one
row. So

- one DMA brings K and V of all heads of a page;
- a head's rows of consecutive pages, copied one below the other, are the operand of both matrix products as they
  lie, with no shuffle; packing (two bfloat16 rows, four 8 bit rows in one register row) is the hardware's own;
- head_dim 64 fills the 128 lanes of a register exactly, while K and V apart would each be padded to twice their size.

Where D is no multiple of 128 lanes the kernel never cuts a row in two. Queries get zeros beside K's part, so that the
product over the whole row is q.k, and the output is taken from V's lanes of weights times whole rows. Both cost
nothing as long as 2 * D fills the same lanes as D.

The float32 scales of a quantised page are `[K, scale_lanes]`: for each head those of the keys and then those of the
values, along the lanes, as scores have their tokens.

Rows are padded with zeros to the whole 128 lanes that they take anyhow. Else XLA would rather store the arrays with the
pages along the lanes, and turn the whole pool round before and after each step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.api import AttentionSpec

LANES = 128


def tile_rows(dtype) -> int:
    """Rows of a hardware tile: what a DMA along the token axis starts at a multiple of."""
    return 32 // jnp.dtype(dtype).itemsize


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def write_rows(spec: AttentionSpec) -> int:
    """Rows of the aligned piece of a page that is read, changed and written back.

    The scales of a quantised page lie in one hardware tile, so there the piece is the page.
    """
    return spec.page_size if spec.quantized else min(spec.page_size, tile_rows(spec.dtype))


def whole_rows(spec: AttentionSpec) -> bool:
    """Whether both products take K and V together (see the module)."""
    return spec.head_dim % LANES != 0


def row_lanes(spec: AttentionSpec) -> int:
    return round_up(2 * spec.head_dim, LANES)


def row_part(spec: AttentionSpec) -> int:
    """Lanes of a query and of an output row."""
    return row_lanes(spec) if whole_rows(spec) else spec.head_dim


def scale_lanes(spec: AttentionSpec) -> int:
    return round_up(2 * spec.page_size, LANES)


def unsupported(spec: AttentionSpec) -> str | None:
    if spec.dtype == "float16":
        return "a float16 pool: TPUs compute in bfloat16 and float32"
    if spec.page_size % write_rows(spec):
        return f"pages of {spec.page_size} tokens: a page of {spec.dtype} is a multiple of {tile_rows(spec.dtype)}"
    return None


def pool_spec(spec: AttentionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    pages, K, N = spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size
    pool = {"kv": jax.ShapeDtypeStruct((pages, K, N, row_lanes(spec)), jnp.dtype(spec.dtype))}
    if spec.quantized:
        pool["scales"] = jax.ShapeDtypeStruct((pages, K, scale_lanes(spec)), jnp.float32)
    return pool


def new_rows(k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
    """k, v [T, K, D] -> f32 [T, K, row_lanes], values of the pool's dtype.

    The token axis comes first because a DMA may start at any index of an untiled axis; float32, because single rows
    of narrower types share a register row, and cannot be moved alone.
    """
    rows = jnp.concatenate([k, v], axis=-1).astype(spec.dtype).astype(jnp.float32)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, row_lanes(spec) - rows.shape[-1])))


def new_scales(k_scales: jax.Array, v_scales: jax.Array, source: jax.Array, spec: AttentionSpec) -> jax.Array:
    """k_scales, v_scales f32[T, K] -> f32[U, K, scale_lanes], like the pages whose row 0 is token row `source` i32[U].

    Places that no row of the call belongs to hold anything.
    """
    rows = jnp.clip(source[:, None] + jnp.arange(spec.page_size), 0, k_scales.shape[0] - 1)
    pages = jnp.stack([k_scales, v_scales], axis=-1)[rows]                              # [U, N, K, 2]
    pages = pages.transpose(0, 2, 3, 1).reshape(source.shape[0], spec.num_kv_heads, 2 * spec.page_size)
    return jnp.pad(pages, ((0, 0), (0, 0), (0, scale_lanes(spec) - 2 * spec.page_size)))


def split_queries(q: jax.Array, num_decode: int, decode_rows: int, spec: AttentionSpec) -> dict[str, jax.Array | None]:
    """q [T, H, D] -> by case, one block after the other, heads of a group together.

    decode: [num_decode, K, decode_rows, Dq], the group's heads padded to `decode_rows`.
    prefill: [B, K, query_block * G, Dq], row r * G + g is query head g of the group in the block's row r.
    """
    T, H, D = q.shape
    K = spec.num_kv_heads
    G = H // K
    q = jnp.pad(q, ((0, 0), (0, 0), (0, row_part(spec) - D))).reshape(T, K, G, -1)
    decode = prefill = None
    if num_decode:
        decode = jnp.pad(q[:num_decode], ((0, 0), (0, 0), (0, decode_rows - G), (0, 0)))
    if T > num_decode:
        blocks = q[num_decode:].reshape(-1, spec.query_block, K, G, q.shape[-1])
        prefill = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, K, spec.query_block * G, q.shape[-1])
    return {"decode": decode, "prefill": prefill}


def join_outputs(out: dict[str, jax.Array | None], valid: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The inverse of `split_queries` for outputs: [T, H, D], zero where not `valid` [T]."""
    K, H, D = spec.num_kv_heads, spec.num_heads, spec.head_dim
    G, part = H // K, slice(D, 2 * D) if whole_rows(spec) else slice(D)
    parts = []
    if (decode := out["decode"]) is not None:
        parts.append(decode[:, :, :G, part].reshape(-1, H, D))
    if (prefill := out["prefill"]) is not None:
        rows = prefill[..., part].reshape(-1, K, spec.query_block, G, D)
        parts.append(rows.transpose(0, 2, 1, 3, 4).reshape(-1, H, D))
    # The kernel leaves blocks of padding unwritten, whatever was in that memory.
    return jnp.where(valid[:, None, None], jnp.concatenate(parts), 0)
