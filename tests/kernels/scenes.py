"""Ragged batches over a poisoned page pool, and what paged attention must make of them.

The oracle here is numpy in float64, one token at a time, straight from the block tables: it shares no code and
no formula with a backend.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import kernels_pallas as kernels
from kernels_pallas import AttentionBatch, AttentionSpec

BACKENDS = get_args(kernels.Backend)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static in a call. `pages_per_seq`: width of the block tables; `chunks`: prefill query blocks."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    decodes: int
    chunks: int
    query_block: int = 8
    dtype: str = "float32"
    softcap: float | None = None
    windowed: bool = False

    @property
    def num_seqs(self) -> int:
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.chunks * self.query_block

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_layers=2, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            num_pages=self.num_seqs * self.pages_per_seq + 1, page_size=self.page_size, dtype=self.dtype,
            scale=self.head_dim**-0.5, softcap=self.softcap, query_block=self.query_block)

    @property
    def tolerance(self) -> float:
        """Largest error allowed beside values of about 1: a few roundings of the output's dtype."""
        return {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}[self.dtype]


@dataclass(frozen=True)
class Seq:
    """Tokens `start .. start + count - 1` are computed now; the `shared` first pages are those of sequence `donor`."""

    start: int
    count: int
    donor: int = -1
    shared: int = 0

    @property
    def kv_len(self) -> int:
        return self.start + self.count


PADDING = Seq(0, 0)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One call's inputs. `seqs`: decode rows, then chunks; `tables` i32[S, pages]; `starts` i32[S].

    `pages`: K and V as [2, layers, pages, page_size, kv_heads, head_dim] of the pool's dtype, NaN wherever no
    context reaches and wherever this very call will write.
    """

    shape: Shape
    seqs: tuple[Seq, ...]
    tables: np.ndarray
    starts: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: np.ndarray
    layer: int
    window: int | None

    def rows(self, index: int) -> slice:
        """Rows of a sequence on the token axis."""
        return slice(self.starts[index], self.starts[index] + self.seqs[index].count)

    @property
    def batch(self) -> AttentionBatch:
        def ints(values) -> jax.Array:
            return jnp.asarray(np.array(values, np.int32))

        return AttentionBatch(
            block_tables=ints(self.tables), kv_lens=ints([seq.kv_len for seq in self.seqs]),
            query_starts=ints(self.starts), query_lens=ints([seq.count for seq in self.seqs]),
            num_decode=self.shape.decodes, num_tokens=self.shape.num_tokens)


def chunk_starts(shape: Shape, chunks: tuple[Seq, ...]) -> np.ndarray:
    """First rows of decode rows and chunks; padding chunks start behind the last real one."""
    heights = [-(-seq.count // shape.query_block) * shape.query_block for seq in chunks]
    return np.array([*range(shape.decodes), *(shape.decodes + sum(heights[:i]) for i in range(len(chunks)))])


def make_scene(shape: Shape, seqs: tuple[Seq, ...], seed: int, layer: int = 1, window: int | None = None) -> Scene:
    """Pages are dealt at random and values drawn from a normal distribution; padding rows are NaN."""
    rng, spec = np.random.default_rng(seed), shape.spec
    dtype = jnp.dtype(shape.dtype)
    assert len(seqs) == shape.num_seqs and (window is not None) == shape.windowed
    free = iter(rng.permutation(np.arange(1, spec.num_pages)))
    tables = np.zeros((shape.num_seqs, shape.pages_per_seq), np.int32)
    for i, seq in enumerate(seqs):
        used = -(-seq.kv_len // shape.page_size)
        assert used <= shape.pages_per_seq
        if seq.shared:
            donor = seqs[seq.donor]
            assert seq.donor < i and seq.shared <= min(donor.kv_len, seq.start) // shape.page_size
            tables[i, :seq.shared] = tables[seq.donor, :seq.shared]
        tables[i, seq.shared:used] = [next(free) for _ in range(used - seq.shared)]

    def values(*dims: int) -> np.ndarray:
        return rng.normal(size=dims).astype(dtype)

    starts = chunk_starts(shape, seqs[shape.decodes:])
    dims = 2, spec.num_layers, spec.num_pages, shape.page_size, shape.kv_heads, shape.head_dim
    pages = np.full(dims, np.nan, dtype)
    real = np.zeros(shape.num_tokens, bool)
    for table, seq, start in zip(tables, seqs, starts, strict=True):
        real[start:start + seq.count] = True
        for page, offset in places(shape, table, range(seq.start)):
            if np.isnan(pages[0, layer, page, offset]).all():
                pages[:, layer, page, offset] = values(2, shape.kv_heads, shape.head_dim)
    for table, seq in zip(tables, seqs, strict=True):
        for page, offset in places(shape, table, range(seq.start, seq.kv_len)):
            pages[:, layer, page, offset] = np.nan

    def tokens(heads: int) -> np.ndarray:
        rows = values(shape.num_tokens, heads, shape.head_dim)
        rows[~real] = np.nan
        return rows

    return Scene(shape=shape, seqs=seqs, tables=tables, starts=starts, q=tokens(shape.heads), k=tokens(shape.kv_heads),
                 v=tokens(shape.kv_heads), pages=pages, layer=layer, window=window)


def places(shape: Shape, table: np.ndarray, positions: range) -> list[tuple[int, int]]:
    """(page, row in the page) of each position."""
    return [(int(table[at // shape.page_size]), at % shape.page_size) for at in positions]


def expected(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """(out float64 [T, H, D], pages) after the call; padding rows of out are zero."""
    shape, pages = scene.shape, scene.pages.copy()
    for i, seq in enumerate(scene.seqs):
        for row, (page, offset) in enumerate(places(shape, scene.tables[i], range(seq.start, seq.kv_len))):
            pages[:, scene.layer, page, offset] = scene.k[scene.starts[i] + row], scene.v[scene.starts[i] + row]

    out = np.zeros(scene.q.shape)
    group = shape.heads // shape.kv_heads
    for i, seq in enumerate(scene.seqs):
        for position in range(seq.start, seq.kv_len):
            row = scene.starts[i] + position - seq.start
            first = 0 if scene.window is None else max(0, position - scene.window + 1)
            at = np.array(places(shape, scene.tables[i], range(first, position + 1)))
            keys, values = pages[:, scene.layer, at[:, 0], at[:, 1]].astype(np.float64)  # [C, K, D]
            for head in range(shape.heads):
                scores = keys[:, head // group] @ scene.q[row, head].astype(np.float64) * shape.spec.scale
                if shape.softcap is not None:
                    scores = shape.softcap * np.tanh(scores / shape.softcap)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, head // group] / weights.sum()
    return out, pages


@functools.cache
def _compiled(shape: Shape, backend: kernels.Backend):
    """The call, compiled once for each shape."""
    def call(q, k, v, pool, batch, layer, window):
        plan = kernels.plan_batch(batch, shape.spec, backend)
        return kernels.paged_attention(q, k, v, pool, plan, layer=layer, window=window, spec=shape.spec,
                                       backend=backend)
    return jax.jit(call)


def run(scene: Scene, backend: kernels.Backend) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, H, D], pages) of a backend."""
    pool = to_pool(scene.pages, scene.shape.spec, backend)
    out, pool = _compiled(scene.shape, backend)(
        scene.q, scene.k, scene.v, pool, scene.batch, jnp.int32(scene.layer),
        None if scene.window is None else jnp.int32(scene.window))
    return np.asarray(out), from_pool(pool, scene.shape.spec)


def to_pool(pages: np.ndarray, spec: AttentionSpec, backend: kernels.Backend) -> kernels.api.Pool:
    """A pool that holds `pages`. The layout is the backend's own; this and `from_pool` alone look at it."""
    def leaf(x: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        x = x.reshape(-1, *x.shape[2:]).transpose(0, *_axes(wanted.shape, spec))
        assert x.shape == wanted.shape
        return jnp.asarray(np.ascontiguousarray(x).view(wanted.dtype))

    leaves = kernels.pool_spec(spec, backend)
    return {name: leaf(pages[i], leaves[name]) for i, name in enumerate("kv")}


def from_pool(pool: kernels.api.Pool, spec: AttentionSpec) -> np.ndarray:
    """The inverse of `to_pool`."""
    def pages(x: np.ndarray) -> np.ndarray:
        x = x.view(jnp.dtype(spec.dtype)).transpose(np.argsort([0, *_axes(x.shape, spec)]))
        return x.reshape(spec.num_layers, spec.num_pages, *x.shape[1:])

    return np.stack([pages(np.asarray(pool[name])) for name in "kv"])


def _axes(shape: tuple[int, ...], spec: AttentionSpec) -> tuple[int, ...]:
    """Where a leaf's axes come from in [page, row, kv head, dim]; it has the kv heads first."""
    assert spec.page_size != spec.head_dim, "the axes could not be told apart"
    return (2, 1, 3) if shape[2] == spec.page_size else (2, 3, 1)


def bits(x: np.ndarray) -> np.ndarray:
    """For comparisons that also tell one NaN from another."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_right(scene: Scene, backend: kernels.Backend) -> None:
    """Output near the oracle's; pages equal to the oracle's bit for bit, but for the layer's dummy page."""
    out, pages = run(scene, backend)
    wanted, wanted_pages = expected(scene)
    assert out.dtype == jnp.dtype(scene.shape.dtype)
    error = np.abs(out.astype(np.float64) - wanted)
    assert error.max() <= scene.shape.tolerance, (error.max(), np.unravel_index(error.argmax(), error.shape))
    padding = np.ones(scene.shape.num_tokens, bool)
    for i in range(scene.shape.num_seqs):
        padding[scene.rows(i)] = False
    assert not bits(out[padding]).any()
    pages[:, scene.layer, 0] = wanted_pages[:, scene.layer, 0]
    np.testing.assert_array_equal(bits(pages), bits(wanted_pages))


# -- random batches


def _lengths(shape: Shape, most: int) -> st.SearchStrategy[int]:
    """1 .. most, often next to the border of a page or of a query block."""
    borders = {edge + delta for step in (shape.page_size, shape.query_block, 64)
               for edge in range(0, most + 2, step) for delta in (-1, 0, 1)} | {1, most}
    return st.sampled_from(sorted(n for n in borders if 1 <= n <= most)) | st.integers(1, most)


@st.composite
def random_seqs(draw: st.DrawFn, shape: Shape, sharing: bool = True) -> tuple[Seq, ...]:
    """Decode rows with gaps of padding, then chunks of one or more query blocks, as many as there is room for."""
    most = shape.page_size * shape.pages_per_seq
    seqs: list[Seq] = []

    def add(start: int, count: int) -> None:
        donor = draw(st.integers(-1, len(seqs) - 1)) if sharing and start >= shape.page_size else -1
        shared = 0 if donor < 0 else min(seqs[donor].kv_len, start) // shape.page_size
        seqs.append(Seq(start, count, donor if shared else -1, shared))

    for _ in range(shape.decodes):
        if draw(st.integers(0, 4)) == 0:
            seqs.append(PADDING)
        else:
            add(draw(_lengths(shape, most)) - 1, 1)
    room = shape.chunks
    while room and draw(st.integers(0, 5)):
        count = draw(_lengths(shape, min(room * shape.query_block, most)))
        add(draw(st.just(0) | _lengths(shape, most - count)) if count < most else 0, count)
        room -= -(-count // shape.query_block)
    return (*seqs, *[PADDING] * (shape.num_seqs - len(seqs)))


@st.composite
def scenes(draw: st.DrawFn, shape: Shape, sharing: bool = True) -> Scene:
    seqs = draw(random_seqs(shape, sharing))
    most = shape.page_size * shape.pages_per_seq
    window = draw(st.sampled_from([1, 2, shape.page_size - 1, shape.page_size, 65, most, 1 << 30])
                  | st.integers(1, most)) if shape.windowed else None
    return make_scene(shape, seqs, seed=draw(st.integers(0, 2**32 - 1)), layer=draw(st.integers(0, 1)), window=window)


def rearranged(scene: Scene, decodes: list[int], chunks: list[int], seed: int) -> tuple[Scene, dict[int, int]]:
    """The sequences named (no sharing), in this order, on other pages: (scene, old index -> new index)."""
    shape, rng = scene.shape, np.random.default_rng(seed)
    order = [*decodes, *[-1] * (shape.decodes - len(decodes)), *chunks]
    order += [-1] * (shape.num_seqs - len(order))
    seqs = tuple(PADDING if i < 0 else scene.seqs[i] for i in order)
    renamed = np.concatenate([[0], rng.permutation(np.arange(1, shape.spec.num_pages))])
    tables = np.array([np.zeros(shape.pages_per_seq, int) if i < 0 else renamed[scene.tables[i]] for i in order])
    pages = scene.pages.copy()
    pages[:, :, renamed] = scene.pages
    new = dataclasses.replace(scene, seqs=seqs, tables=tables, pages=pages,
                              starts=chunk_starts(shape, seqs[shape.decodes:]))
    rows = {name: np.full_like(getattr(scene, name), np.nan) for name in ("q", "k", "v")}
    for at, i in enumerate(order):
        if i >= 0:
            for name, values in rows.items():
                values[new.rows(at)] = getattr(scene, name)[scene.rows(i)]
    return dataclasses.replace(new, **rows), {i: at for at, i in enumerate(order) if i >= 0}
