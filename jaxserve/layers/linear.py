"""Matrix products: inputs in the weight's dtype, float32 accumulation and results.

The residual stream of a decoder stays float32; only what enters a product is rounded to the weight's
dtype. Weights are stored `[in..., out...]`, the tied embedding and the output head `[out, in]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot(x: jax.Array, w: jax.Array, axes: int = 1) -> jax.Array:
    """Contracts the last `axes` axes of x with the first `axes` of w.

    Args:
        x: `[rows..., in...]`, any float dtype; rounded to the dtype of w.
        w: `[in..., out...]`.

    Returns:
        float32 `[rows..., out...]`.
    """
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
