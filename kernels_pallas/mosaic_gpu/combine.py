"""Joins the parts of split contexts. Plain XLA: it reads a few percent of what the decode kernel reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.mosaic_gpu.decode import STATS_ROWS
from kernels_pallas.mosaic_gpu.warpgroup import LOG2_E


def combine(partials: jax.Array, splits: jax.Array, sinks: jax.Array | None, group: int) -> jax.Array:
    """One softmax over all parts, and over the sink, which has a weight and no value.

    Args:
        partials: f32[S, max_splits, K, D + STATS_ROWS, padded G] of `decode_partials`.
        splits: i32[S], how many parts each context has.
        sinks: f32[K, G] or None.

    Returns:
        f32[S, K, G, D]; rows without a context are zero.
    """
    D = partials.shape[3] - STATS_ROWS
    real = (jnp.arange(partials.shape[1])[None] < splits[:, None])[:, :, None, None]           # [S, splits, 1, 1]
    acc, top, total = partials[..., :D, :group], partials[..., D, :group], partials[..., D + 1, :group]
    top = jnp.where(real, top, -jnp.inf)                                                        # [S, splits, K, G]
    joint = top.max(axis=1)
    if sinks is not None:
        joint = jnp.maximum(joint, sinks * LOG2_E)
    joint = jnp.where(splits[:, None, None] > 0, joint, 0.0)
    weights = jnp.exp2(top - joint[:, None])
    total = jnp.sum(jnp.where(real, total * weights, 0.0), axis=1)                              # [S, K, G]
    if sinks is not None:
        total += jnp.exp2(sinks * LOG2_E - joint)
    acc = jnp.sum(jnp.where(real[..., None], acc * weights[..., None, :], 0.0), axis=1)         # [S, K, D, G]
    out = acc / jnp.maximum(total, 1e-30)[:, :, None]
    return out.swapaxes(2, 3)
