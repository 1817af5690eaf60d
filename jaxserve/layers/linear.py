"""Matrix products: inputs in the weight's dtype, float32 accumulation and results.

The residual stream of a decoder stays float32; only what enters a product is rounded to the weight's
dtype. Weights are stored `[in..., out...]`, the tied embedding and the output head `[out, in]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import cpu_native


@dataclass(frozen=True)
class LayerOf:
    """One layer's matrix, left in its stack `[L, in..., out...]`: the native CPU product reads it where it lies."""

    stack: jax.Array
    layer: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights; their stack may hold bfloat16 as uint16."""
        return jnp.dtype(jnp.bfloat16) if self.stack.dtype == jnp.uint16 else self.stack.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]


def dot(x: jax.Array, w: jax.Array | LayerOf, axes: int = 1) -> jax.Array:
    """Contracts the last `axes` axes of x with the first `axes` of w.

    Args:
        x: `[rows..., in...]`, any float dtype; rounded to the dtype of w.
        w: `[in..., out...]`.

    Returns:
        float32 `[rows..., out...]`.
    """
    if isinstance(w, LayerOf):
        inputs = math.prod(w.shape[:axes])
        # Rounded as for any other product: the weight's precision is the precision of what it multiplies.
        rows = x.astype(w.dtype).astype(jnp.float32).reshape(-1, inputs)
        out = cpu_native.linear(rows, w.stack.reshape(w.stack.shape[0], inputs, -1), w.layer)
        return out.reshape(*x.shape[:x.ndim - axes], *w.shape[axes:])
    return _dot(x, w, tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes)))


def dot_transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    """As `dot`, for one matrix stored `[out, in]`: x `[rows..., in]` gives float32 `[rows..., out]`."""
    return _dot(x, w, (x.ndim - 1,), (1,))


def _dot(x: jax.Array, w: jax.Array, x_axes: tuple[int, ...], w_axes: tuple[int, ...]) -> jax.Array:
    # Accelerators multiply float32 with fewer bits unless told otherwise: TF32 on GPUs, bfloat16 passes on
    # TPUs. Someone who asks for float32 weights wants float32 products.
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return lax.dot_general(x.astype(w.dtype), w, ((x_axes, w_axes), ((), ())), precision=precision,
                           preferred_element_type=jnp.float32)
