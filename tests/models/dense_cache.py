"""The plainest attention there is: one sequence, a dense cache, a mask over all positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.models.spec import DecoderSpec


def empty_cache(spec: DecoderSpec, length: int, dtype=jnp.float32):
    """K and V, each `[L, length, K, D]`."""
    shape = (spec.num_layers, length, spec.num_kv_heads, spec.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def dense_attend(spec: DecoderSpec, positions: jax.Array):
    """An `attend` for `decode_tokens` whose tokens all belong to one sequence, at `positions` `[T]`."""

    def attend(q, k, v, kv, layer, window):
        keys, values = (cache.at[layer, positions].set(new) for cache, new in zip(kv, (k, v), strict=True))
        T, H, D = q.shape
        grouped = q.reshape(T, spec.num_kv_heads, spec.heads_per_kv, D).astype(jnp.float32)
        scores = jnp.einsum("tkgd,nkd->tkgn", grouped, keys[layer].astype(jnp.float32)) * spec.attn_scale
        if spec.attn_softcap is not None:
            scores = spec.attn_softcap * jnp.tanh(scores / spec.attn_softcap)
        key_position = jnp.arange(keys.shape[1])[None, :]
        seen = key_position <= positions[:, None]
        if window is not None:
            seen &= key_position > positions[:, None] - window
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("tkgn,nkd->tkgd", weights, values[layer].astype(jnp.float32))
        return out.reshape(T, H, D), (keys, values)

    return attend
