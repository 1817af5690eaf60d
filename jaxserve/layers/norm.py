"""RMSNorm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
    """Normalises the last axis of x to a root mean square of one, in float32.

    Args:
        x: `[..., E]`.
        weight: `[E]`.
        plus_one: multiply with `1 + weight` (Gemma stores its weights around zero).

    Returns:
        float32, shaped as x.
    """
    x = x.astype(jnp.float32)
    scale = weight.astype(jnp.float32)
    if plus_one:
        scale = 1.0 + scale
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale
