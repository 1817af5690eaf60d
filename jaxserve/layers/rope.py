"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), the device part.

Which frequencies a checkpoint wants is worked out on the host, in `models/rope_config.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def cos_sin(inv_freq: Sequence[float], attention_factor: float, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rotation of each token. The same in all layers, so compute it once a step, outside the layer scan.

    Args:
        inv_freq: one inverse frequency for each rotated pair (R of them).
        attention_factor: factor on cos and sin.
        positions: int32 `[T]`.

    Returns:
        cos and sin, float32 `[T, R]`.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)  # [T, R]
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2R dims of every head; the others pass through (partial rotary).

    Dim i is paired with dim i + R, the layout of Hugging Face checkpoints; the papers pair neighbours.

    Args:
        x: `[T, H, D]`, D >= 2R.
        cos, sin: float32 `[T, R]`.

    Returns:
        float32 `[T, H, D]`.
    """
    half = cos.shape[-1]
    x = x.astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, R]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
