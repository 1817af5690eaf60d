"""Ragged batches over a poisoned page pool, and what paged attention must make of them.

The oracle here is numpy, attention in float64 and one token at a time, straight from the block tables: it shares no
code and no formula with a backend.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kernels_pallas import AttentionBatch, AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static in a call.

    `pages_per_seq`: width of the block tables; `chunks`: prefill query blocks; `dtype`: of q, k, v and the output;
    `pool_dtype`: of the pool, None for the same.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    decodes: int
    chunks: int
    query_block: int = 8
    dtype: str = "float32"
    pool_dtype: str | None = None
    softcap: float | None = None
    windowed: bool = False
    sinks: bool = False

    @property
    def num_seqs(self) -> int:
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.chunks * self.query_block

    @property
    def max_len(self) -> int:
        """Tokens of the longest context."""
        return self.page_size * self.pages_per_seq

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_layers=2, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            num_pages=self.num_seqs * self.pages_per_seq + 1, page_size=self.page_size,
            dtype=self.pool_dtype or self.dtype, scale=self.head_dim**-0.5, softcap=self.softcap,
            query_block=self.query_block)

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


@dataclass(frozen=True)
class Pages:
    """What a pool holds, laid out for nobody: K is index 0, V is index 1.

    `values` [2, layers, pages, page_size, kv_heads, head_dim] of the pool's dtype; `scales` f32, the same without
    head_dim, or None.
    """

    values: np.ndarray
    scales: np.ndarray | None

    @classmethod
    def poisoned(cls, spec: AttentionSpec) -> Pages:
        """NaN everywhere; int8, which has none, is at its largest and its scales are NaN."""
        dtype = jnp.dtype(spec.dtype)
        shape = 2, spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
        values = np.full(shape, 127 if dtype == np.int8 else np.nan, dtype)
        return cls(values, np.full(shape[:-1], np.nan, np.float32) if spec.quantized else None)

    def copy(self) -> Pages:
        return Pages(self.values.copy(), None if self.scales is None else self.scales.copy())

    def write(self, layer: int, page: int, offset: int, k: np.ndarray, v: np.ndarray) -> None:
        """Stores the rows [K, D] of one token."""
        rows = np.stack([k, v])
        if self.scales is None:
            self.values[:, layer, page, offset] = rows
        else:
            values, scales = quantized(rows, self.values.dtype)
            self.values[:, layer, page, offset], self.scales[:, layer, page, offset] = values, scales

    def poison(self, layer: int, page: int, offset: int) -> None:
        self.values[:, layer, page, offset] = 127 if self.values.dtype == np.int8 else np.nan
        if self.scales is not None:
            self.scales[:, layer, page, offset] = np.nan

    def read(self, layer: int, at: np.ndarray) -> np.ndarray:
        """float64 [2, C, K, D] of the places `at` i32[C, 2]."""
        rows = self.values[:, layer, at[:, 0], at[:, 1]].astype(np.float64)
        return rows if self.scales is None else rows * self.scales[:, layer, at[:, 0], at[:, 1], :, None]


def quantized(rows: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., D] as (values, scales [...]); see `kernels_pallas.quantize`."""
    rows, largest = rows.astype(np.float32), 127 if dtype == np.int8 else 448
    top = np.abs(rows).max(axis=-1)
    scales = top * np.float32(1 / largest)
    finite = np.isfinite(top)
    usable = finite & (scales >= np.finfo(np.float32).tiny)
    inverse = np.divide(np.float32(1), scales, where=usable, out=np.zeros_like(scales))
    values = np.multiply(rows, inverse[..., None], where=usable[..., None], out=np.zeros_like(rows))
    values = np.clip(np.rint(values) if dtype == np.int8 else values, -largest, largest)
    return values.astype(dtype), np.where(usable, scales, np.where(finite, np.float32(1), np.float32(np.nan)))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One call's inputs. `seqs`: decode rows, then chunks; `tables` i32[S, pages]; `starts` i32[S].

    `pages` are poisoned wherever no context reaches and wherever this very call will write. `sinks`: f32[H] or None.
    """

    shape: Shape
    seqs: tuple[Seq, ...]
    tables: np.ndarray
    starts: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None
    pages: Pages
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
    pages, written = Pages.poisoned(spec), set()
    real = np.zeros(shape.num_tokens, bool)
    for table, seq, start in zip(tables, seqs, starts, strict=True):
        real[start:start + seq.count] = True
        for place in places(shape, table, range(seq.start)):
            if place not in written:
                written.add(place)
                pages.write(layer, *place, values(shape.kv_heads, shape.head_dim),
                            values(shape.kv_heads, shape.head_dim))
    for table, seq in zip(tables, seqs, strict=True):
        for place in places(shape, table, range(seq.start, seq.kv_len)):
            pages.poison(layer, *place)

    def tokens(heads: int) -> np.ndarray:
        rows = values(shape.num_tokens, heads, shape.head_dim)
        rows[~real] = np.nan
        return rows

    sinks = rng.normal(size=shape.heads).astype(np.float32) if shape.sinks else None
    return Scene(shape=shape, seqs=seqs, tables=tables, starts=starts, q=tokens(shape.heads), k=tokens(shape.kv_heads),
                 v=tokens(shape.kv_heads), sinks=sinks, pages=pages, layer=layer, window=window)


def places(shape: Shape, table: np.ndarray, positions: range) -> list[tuple[int, int]]:
    """(page, row in the page) of each position."""
    return [(int(table[at // shape.page_size]), at % shape.page_size) for at in positions]


def expected(scene: Scene) -> tuple[np.ndarray, Pages]:
    """(out float64 [T, H, D], pages) after the call; padding rows of out are zero."""
    shape, pages = scene.shape, scene.pages.copy()
    for i, seq in enumerate(scene.seqs):
        for row, place in enumerate(places(shape, scene.tables[i], range(seq.start, seq.kv_len)), scene.starts[i]):
            pages.write(scene.layer, *place, scene.k[row], scene.v[row])

    out = np.zeros(scene.q.shape)
    group = shape.heads // shape.kv_heads
    for i, seq in enumerate(scene.seqs):
        for position in range(seq.start, seq.kv_len):
            row = scene.starts[i] + position - seq.start
            first = 0 if scene.window is None else max(0, position - scene.window + 1)
            keys, values = pages.read(
                scene.layer, np.array(places(shape, scene.tables[i], range(first, position + 1))))  # [C, K, D]
            for head in range(shape.heads):
                scores = keys[:, head // group] @ scene.q[row, head].astype(np.float64) * shape.spec.scale
                if shape.softcap is not None:
                    scores = shape.softcap * np.tanh(scores / shape.softcap)
                sink = -np.inf if scene.sinks is None else scene.sinks[head]
                largest = max(scores.max(), sink)
                weights = np.exp(scores - largest)
                out[row, head] = weights @ values[:, head // group] / (weights.sum() + np.exp(sink - largest))
    return out, pages


# -- random batches


def _lengths(shape: Shape, most: int) -> st.SearchStrategy[int]:
    """1 .. most, often next to the border of a page or of a query block."""
    borders = {edge + delta for step in (shape.page_size, shape.query_block, 64)
               for edge in range(0, most + 2, step) for delta in (-1, 0, 1)} | {1, most}
    return st.sampled_from(sorted(n for n in borders if 1 <= n <= most)) | st.integers(1, most)


@st.composite
def random_seqs(draw: st.DrawFn, shape: Shape, sharing: bool = True) -> tuple[Seq, ...]:
    """Decode rows with gaps of padding, then chunks of one or more query blocks, as many as there is room for."""
    most = shape.max_len
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
    borders = [1, 2, shape.page_size - 1, shape.page_size, 65, shape.max_len, 1 << 30]
    window = draw(st.sampled_from(borders) | st.integers(1, shape.max_len)) if shape.windowed else None
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
    pages.values[:, :, renamed] = scene.pages.values
    if pages.scales is not None:
        pages.scales[:, :, renamed] = scene.pages.scales
    new = dataclasses.replace(scene, seqs=seqs, tables=tables, pages=pages,
                              starts=chunk_starts(shape, seqs[shape.decodes:]))
    rows = {name: np.full_like(getattr(scene, name), np.nan) for name in ("q", "k", "v")}
    for at, i in enumerate(order):
        if i >= 0:
            for name, values in rows.items():
                values[new.rows(at)] = getattr(scene, name)[scene.rows(i)]
    return dataclasses.replace(new, **rows), {i: at for at, i in enumerate(order) if i >= 0}
