"""What the shared tests must know of a backend: how its pool is laid out, and which shapes it can do in a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import AttentionSpec
from kernels_pallas.api import Pool
from tests.kernels.scenes import Pages, Shape


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Attributes:
        to_pool, from_pool: between `Pages` and the backend's own layout, without loss of a bit. These alone look
            into a pool.
        shapes: of random batches, by name. Each is compiled once.
        tiny: of the corners: 2 decode rows, 2 chunks, at least 3 query blocks and 5 pages of context. Variants of it
            that the backend does not support are skipped.
        examples: random batches of each shape; an interpreted kernel has time for few.
        running: entered around each call, for kernels that need an interpreter.
        marks: of every test of the backend.
    """

    to_pool: Callable[[Pages, AttentionSpec], Pool]
    from_pool: Callable[[Pool, AttentionSpec], Pages]
    shapes: Mapping[str, Shape]
    tiny: Shape
    examples: int = 15
    running: Callable[[], AbstractContextManager] = contextlib.nullcontext
    marks: Collection[pytest.MarkDecorator] = ()


# Every group size from 1 to 5, head dims from 16 to 128 (powers of two or not), every page size in use, more decode
# rows than a tile of the XLA path holds, chunks of one and of several query blocks, every dtype.
_SHAPES = {
    "mixed": Shape(heads=2, kv_heads=2, head_dim=16, page_size=8, pages_per_seq=17, decodes=5, chunks=4),
    "mixed, window": Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, pages_per_seq=9, decodes=3, chunks=6,
                           windowed=True),
    "mixed, bfloat16": Shape(heads=6, kv_heads=2, head_dim=96, page_size=16, pages_per_seq=9, decodes=2, chunks=3,
                             query_block=32, dtype="bfloat16", softcap=5.0, windowed=True),
    "decode only": Shape(heads=4, kv_heads=1, head_dim=80, page_size=64, pages_per_seq=4, decodes=19, chunks=0),
    "prefill only": Shape(heads=5, kv_heads=1, head_dim=128, page_size=64, pages_per_seq=3, decodes=0, chunks=5,
                          query_block=32, dtype="float16", softcap=30.0),
    "sinks": Shape(heads=8, kv_heads=2, head_dim=32, page_size=16, pages_per_seq=5, decodes=3, chunks=3,
                   windowed=True, sinks=True),
    "float32 over bfloat16": Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=2,
                                   chunks=2, pool_dtype="bfloat16"),
    "int8": Shape(heads=6, kv_heads=3, head_dim=32, page_size=16, pages_per_seq=9, decodes=3, chunks=3,
                  pool_dtype="int8", softcap=10.0),
    "fp8": Shape(heads=4, kv_heads=2, head_dim=64, page_size=8, pages_per_seq=17, decodes=9, chunks=2,
                 dtype="bfloat16", pool_dtype="float8_e4m3fn", windowed=True, sinks=True),
}
_TINY = Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=2, chunks=2)


def _leaf(x: np.ndarray, *axes: int, dtype: str | None = None) -> jnp.ndarray:
    """[layers, pages, ...] -> [layers * pages, ...], the rest in the order of `axes`, bits read as `dtype`."""
    x = np.ascontiguousarray(x.reshape(-1, *x.shape[2:]).transpose(0, *axes))
    return jnp.asarray(x if dtype is None else x.view(dtype))


def _pages(leaf: jnp.ndarray, spec: AttentionSpec, *axes: int, dtype: str | None = None) -> np.ndarray:
    """The inverse of `_leaf`."""
    x = np.asarray(leaf)
    x = (x if dtype is None else x.view(jnp.dtype(dtype))).transpose(np.argsort([0, *axes]))
    return x.reshape(spec.num_layers, spec.num_pages, *x.shape[1:])


def _harness(k_axes: tuple[int, ...], v_axes: tuple[int, ...], bits: Callable[[AttentionSpec], str | None]) -> Harness:
    """For leaves "k", "v" and their scales, which have the kv heads first."""
    def to_pool(pages: Pages, spec: AttentionSpec) -> Pool:
        pool = {name: _leaf(pages.values[i], *axes, dtype=bits(spec))
                for i, (name, axes) in enumerate((("k", k_axes), ("v", v_axes)))}
        if pages.scales is not None:
            pool |= {f"{name}_scale": _leaf(pages.scales[i], 2, 1) for i, name in enumerate("kv")}
        return pool

    def from_pool(pool: Pool, spec: AttentionSpec) -> Pages:
        values = np.stack([_pages(pool[name], spec, *axes, dtype=spec.dtype)
                           for name, axes in (("k", k_axes), ("v", v_axes))])
        if not spec.quantized:
            return Pages(values, None)
        return Pages(values, np.stack([_pages(pool[f"{name}_scale"], spec, 2, 1) for name in "kv"]))

    return Harness(to_pool=to_pool, from_pool=from_pool, shapes=_SHAPES, tiny=_TINY)


REFERENCE = _harness((2, 1, 3), (2, 1, 3), lambda spec: None)
# Keys lie transposed, and small floats as integers.
XLA = _harness((2, 3, 1), (2, 1, 3), lambda spec: {
    "bfloat16": "uint16", "float16": "uint16", "float8_e4m3fn": "uint8"}.get(spec.dtype))
