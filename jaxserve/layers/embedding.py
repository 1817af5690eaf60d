"""Token ids to vectors and back to logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.layers.linear import dot_transposed


def embed(table: jax.Array, token_ids: jax.Array, scale: float) -> jax.Array:
    """Rows of the table, scaled.

    Args:
        table: `[V, E]`.
        token_ids: int32 `[T]`. The host has checked that they are in the vocabulary.

    Returns:
        float32 `[T, E]`.
    """
    rows = table.at[token_ids].get(mode="clip").astype(jnp.float32)
    if scale == 1.0:
        return rows
    # The scale is rounded to the table's dtype first: Gemma was trained so (sqrt(3072) is 55.5 in bfloat16).
    return rows * jnp.asarray(scale, table.dtype).astype(jnp.float32)


def unembed(table: jax.Array, hidden: jax.Array, softcap: float | None) -> jax.Array:
    """Logits of every token of the vocabulary.

    Args:
        table: `[V, E]`, the output head or the tied embedding.
        hidden: `[R, E]`.
        softcap: logits are squeezed into (-softcap, softcap) by tanh; None: as they are.

    Returns:
        float32 `[R, V]`.
    """
    logits = dot_transposed(hidden, table)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
