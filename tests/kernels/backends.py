"""Runs scenes on every attention backend."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kernels
from tests.kernels import harness
from tests.kernels.mosaic_gpu_harness import MOSAIC_GPU
from tests.kernels.mosaic_tpu_harness import MOSAIC_TPU
from tests.kernels.scenes import Pages, Scene, Shape, expected

HARNESSES: dict[kernels.Backend, harness.Harness] = {
    "reference": harness.REFERENCE, "xla": harness.XLA, "cpu_native": harness.XLA, "mosaic_gpu": MOSAIC_GPU,
    "mosaic_tpu": MOSAIC_TPU}


def skip_unsupported(shape: Shape, backend: kernels.Backend) -> None:
    """Skips the test where the backend says by itself that it cannot do the shape."""
    missing = importlib.import_module(f"kernels_pallas.{backend}").unsupported(shape.spec)
    if missing is not None:
        pytest.skip(f"{backend} cannot do {missing}")


@functools.cache
def _compiled(shape: Shape, backend: kernels.Backend):
    """The call, compiled once for each shape."""
    def call(q, k, v, pool, batch, layer, window, sinks):
        plan = kernels.plan_batch(batch, shape.spec, backend)
        return kernels.paged_attention(q, k, v, pool, plan, layer=layer, window=window, sinks=sinks, spec=shape.spec,
                                       backend=backend)
    return jax.jit(call)


def run(scene: Scene, backend: kernels.Backend) -> tuple[np.ndarray, Pages]:
    """(out [T, H, D], pages) of a backend."""
    spec, side = scene.shape.spec, HARNESSES[backend]
    pool = side.to_pool(scene.pages, spec)
    wanted = kernels.pool_spec(spec, backend)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), pool) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    with side.running():
        out, pool = _compiled(scene.shape, backend)(
            scene.q, scene.k, scene.v, pool, scene.batch, jnp.int32(scene.layer),
            None if scene.window is None else jnp.int32(scene.window), scene.sinks)
        out = np.asarray(out)
    return out, side.from_pool(pool, spec)


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
    for found, right in ((pages.values, wanted_pages.values), (pages.scales, wanted_pages.scales)):
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            found[:, scene.layer, 0] = right[:, scene.layer, 0]
            np.testing.assert_array_equal(bits(found), bits(right))
