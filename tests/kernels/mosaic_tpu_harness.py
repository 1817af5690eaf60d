"""The TPU kernel under the shared tests: interpreted on the CPU with all checks, in steps so short that a context of a
few tokens takes several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
import numpy as np

from kernels_pallas import AttentionSpec
from kernels_pallas._compat import tpu_interpreter
from kernels_pallas.mosaic_tpu import blocks
from kernels_pallas.mosaic_tpu.layout import row_lanes, scale_lanes
from tests.kernels.harness import Harness
from tests.kernels.scenes import Pages, Shape


@contextlib.contextmanager
def short_steps() -> Iterator[None]:
    """KV steps of 16 tokens, and prefill tiles of two query blocks of the shapes below."""
    with mock.patch.dict(blocks.KV_TOKENS, decode=16, prefill=16), mock.patch.object(blocks, "PREFILL_ROWS", 32):
        yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    with short_steps(), tpu_interpreter():
        yield


def to_pool(pages: Pages, spec: AttentionSpec) -> dict[str, jnp.ndarray]:
    kv = np.concatenate(list(pages.values), axis=-1).swapaxes(2, 3)                      # [L, P, K, N, 2D]
    kv = np.pad(kv, ((0, 0),) * 4 + ((0, row_lanes(spec) - kv.shape[-1]),))
    pool = {"kv": jnp.asarray(kv.reshape(-1, *kv.shape[2:]))}
    if pages.scales is not None:
        scales = np.concatenate(list(pages.scales.swapaxes(3, 4)), axis=-1)              # [L, P, K, 2N]
        padding = scale_lanes(spec) - scales.shape[-1]
        scales = np.pad(scales, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=np.nan)
        pool["scales"] = jnp.asarray(scales.reshape(-1, *scales.shape[2:]))
    return pool


def from_pool(pool: dict[str, jnp.ndarray], spec: AttentionSpec) -> Pages:
    def halves(leaf: np.ndarray) -> np.ndarray:                                          # [2, L, P, ...]
        return np.stack(np.split(leaf.reshape(spec.num_layers, spec.num_pages, *leaf.shape[1:]), 2, -1))

    values = np.ascontiguousarray(halves(np.asarray(pool["kv"])[..., :2 * spec.head_dim]).swapaxes(3, 4))
    if not spec.quantized:
        return Pages(values, None)
    scales = np.asarray(pool["scales"])[..., :2 * spec.page_size]
    return Pages(values, np.ascontiguousarray(halves(scales).swapaxes(3, 4)))


# An interpreted step takes milliseconds, so: few rows, short contexts, and only what is different for this kernel.
SHAPES = {
    "mixed": Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=7, decodes=3, chunks=3),
    "head dim 128, window, sinks": Shape(heads=3, kv_heads=1, head_dim=128, page_size=16, pages_per_seq=4, decodes=2,
                                         chunks=2, windowed=True, sinks=True, softcap=5.0, dtype="bfloat16"),
    "int8": Shape(heads=2, kv_heads=2, head_dim=32, page_size=8, pages_per_seq=6, decodes=2, chunks=2,
                  pool_dtype="int8", windowed=True),
}

MOSAIC_TPU = Harness(to_pool=to_pool, from_pool=from_pool, shapes=SHAPES,
                     tiny=Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=6, decodes=2, chunks=2,
                                query_block=8),
                     examples=2, running=interpreted)
