"""What both kernels are made of: products, layouts, copies of pages.

jax's interpreter knows copies, barriers, threads and races, but of wgmma only products of untransposed operands in
shared memory (jax 0.10.2 to 0.12.0.1), and no layouts of values before 0.12. So under `interpreted()` a product
reads its operands and is an ordinary dot, and layouts are left out; all else is the same program.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import _compat
from kernels_pallas.mosaic_gpu.layout import WGMMA_ROWS, KVBlocks

Ref = Any
_Accumulator: Any = plgpu.WGMMAAccumulatorRef

ROWS_AND_COLUMNS = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)       # a value for each row of a wgmma result
COLUMNS = plgpu.Layout.WGMMA.reduce(0)    # a value for each column

LOG2_E = math.log2(math.e)
# A running maximum starts above what masked scores are set to: then exp2(masked - maximum) is 0 even in a step
# where a row sees nothing, and no inf - inf can occur.
MASKED = -1e30
LOWEST = -1e20

_interpreter: contextvars.ContextVar[Any] = contextvars.ContextVar("mosaic_gpu_interpreter", default=None)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels traced inside run in jax's interpreter, on the CPU, at a millionth of the speed."""
    token = _interpreter.set(_compat.gpu_interpreter(detect_races=detect_races))
    try:
        yield
    finally:
        _interpreter.reset(token)


def is_interpreted() -> bool:
    return _interpreter.get() is not None


def kernel(body, *, out_type, scratch_types, grid: int, num_threads: int):
    """`plgpu.kernel` over a one-dimensional grid "block" of thread blocks of warpgroups "wg"."""
    return plgpu.kernel(
        body, out_type=out_type, scratch_types=scratch_types, grid=(grid,), grid_names=("block",),
        num_threads=num_threads, thread_name="wg", interpret=_interpreter.get() or False,
        # The default differs between jax versions; here layouts are explicit.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane))


def operand(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory that TMA can fill and wgmma can read: its last two axes in swizzled tiles."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def laid_out(x: jax.Array, layout) -> jax.Array:
    return x if is_interpreted() else plgpu.layout_cast(x, layout)


def full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    return laid_out(jnp.full(shape, value, jnp.float32), layout)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    if is_interpreted():
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=ROWS_AND_COLUMNS)


def matmul_t(a: Ref, b: Ref, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """a [M, K] @ b [N, K]^T -> f32[M, N]. `meanwhile`: done between the start of the product and its end."""
    if is_interpreted():
        result = _dot(a[...], b[...].T)
        meanwhile()
        return result

    def product(acc):
        plgpu.wgmma(acc, a, b.T)
        meanwhile()
        return acc[...]

    return pl.run_scoped(product, _Accumulator((a.shape[0], b.shape[0]), jnp.float32))


def add_matmul(acc: jax.Array, a: jax.Array, b: Ref) -> jax.Array:
    """acc f32[M, N] + a [M, K] @ b [K, N], a in registers."""
    if is_interpreted():
        return acc + _dot(a, b[...])
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(_Accumulator.init(acc))


def add_t_matmul_t(acc: jax.Array, a: Ref, b: Ref) -> jax.Array:
    """acc f32[M, N] + a [K, M]^T @ b [N, K]^T."""
    if is_interpreted():
        return acc + _dot(a[...].T, b[...].T)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a.T, b.T))(_Accumulator.init(acc))


def store_transposed(ref: Ref, x: jax.Array) -> None:
    """ref [N, M] = x [M, N] of 16 bits."""
    if is_interpreted():
        ref[...] = x.T
    else:
        ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # wgmma reads as TMA writes, through the asynchronous proxy. What stands for it here reads through the generic one,
    # which the interpreter of jax 0.12 wants fenced off from later copies.
    plgpu.commit_smem()
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value for each row, for all columns."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (1,))


def cdiv(a, b: int):
    """For integers from 0 on; jnp's division rounds down, which costs more instructions."""
    return lax.div(a + (b - 1), jnp.int32(b))


def softcapped(scores: jax.Array, cap: float) -> jax.Array:
    # tanh = 1 - 2 / (1 + e^2x). tanh.approx has an error of 5e-4, times `cap`; an exact division takes ten
    # instructions; the square of an approximate rsqrt takes two, and is right to the last bits.
    root = lax.rsqrt(1 + jnp.exp2(scores * (2 * LOG2_E / cap)))
    return cap - (2 * cap) * (root * root)


@dataclass(frozen=True)
class Pipeline:
    """A ring of buffers through which K or V of one kv head pass, a step of `blocks.block` tokens in each.

    pages: in global memory, [P, K, N, D]. buffers: [stages, block, D]. ready: barriers with `blocks.copies` arrivals,
    free: with one of each warpgroup that reads.
    """

    pages: Ref
    buffers: Ref
    ready: Ref
    free: Ref
    blocks: KVBlocks

    @property
    def stages(self) -> int:
        return self.buffers.shape[0]

    def slot(self, count):
        """Where the step that has `count` steps before it lies."""
        return lax.rem(count, jnp.int32(self.stages))

    def fetch(self, count, head, page_ids: list, step) -> None:
        """Waits for a free buffer and starts its copies."""
        self._wait_free(count)
        self._copy(head, page_ids, step, self.slot(count), self.ready.at[self.slot(count)])

    def fetch_cleaned(self, count, head, page_ids: list, step, context, fetched: Ref) -> None:
        """As `fetch`, but tokens from `context` on are zero.

        Pages may hold anything beyond a context, NaN included, and 0 * NaN is NaN. The copying warpgroup does this
        because it has registers to spare. `fetched`: a barrier with `blocks.copies` arrivals.
        """
        slot, written = self.slot(count), context - step * self.blocks.block

        def clean():
            self._copy(head, page_ids, step, slot, fetched)
            plgpu.barrier_wait(fetched)
            for row in range(0, self.blocks.block, WGMMA_ROWS):
                pl.when(written < row + WGMMA_ROWS)(lambda row=row: zero(row))
            plgpu.commit_smem()
            for _ in range(self.blocks.copies):
                plgpu.barrier_arrive(self.ready.at[slot])

        def zero(row: int):
            # In pieces of 64 x 64, which need 16 registers.
            for column in range(0, self.buffers.shape[2], 64):
                piece = self.buffers.at[slot, pl.ds(row, WGMMA_ROWS), pl.ds(column, 64)]
                x = piece[...]
                piece[...] = jnp.where(row + iota((WGMMA_ROWS, 64), 0) < written, x, jnp.zeros_like(x))

        self._wait_free(count)
        pl.when(written < self.blocks.block)(clean)
        pl.when(written >= self.blocks.block)(lambda: self._copy(head, page_ids, step, slot, self.ready.at[slot]))

    def drain(self, count) -> None:
        wait_for_last(self.free, count, self.stages)

    def _wait_free(self, count) -> None:
        pl.when(count >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[self.slot(count)]))

    def _copy(self, head, page_ids, step, slot, barrier: Ref) -> None:
        rows, size = self.blocks.rows, self.blocks.page_size
        part: Any = slice(None) if size == rows else pl.ds(lax.rem(step * rows, jnp.int32(size)), rows)
        for i, page in enumerate(page_ids):
            plgpu.copy_gmem_to_smem(self.pages.at[page, head, part], self.buffers.at[slot, pl.ds(i * rows, rows)],
                                    barrier)


def page_ids(table: Ref, seq, step, blocks: KVBlocks, base) -> list:
    """Pages of step `step` of a context. table i32[S, pages_per_seq]; base: first page of the layer."""
    first = lax.div(step * blocks.block, jnp.int32(blocks.page_size))
    return [table[seq, first + i] + base for i in range(blocks.copies)]


def wait_for_last(barriers: Ref, count, slots: int) -> None:
    """Waits for the uses of a ring of `slots` that nobody has waited for after `count` uses: every arrival has its
    wait, which the interpreter of jax 0.10 insists on."""
    def wait(i, _):
        plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(slots))])

    lax.fori_loop(jnp.maximum(count - slots, 0), count, wait, None)
