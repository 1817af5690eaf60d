"""The gated MLP (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from jaxserve.layers.linear import dot

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_mlp(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, b_gate_up: jax.Array | None,
              b_down: jax.Array | None, activation: str) -> jax.Array:
    """`down(activation(gate(x)) * up(x))`.

    Args:
        x: `[T, E]`.
        w_gate_up: `[E, 2, F]`, gate then up, or `[E, 2F]`. w_down: `[F, E]`.
        b_gate_up: `[2, F]` or None. b_down: `[E]` or None.
        activation: a key of ACTIVATIONS.

    Returns:
        float32 `[T, E]`.
    """
    gate_up = dot(x, w_gate_up).reshape(-1, 2, w_down.shape[0])  # [T, 2, F]
    if b_gate_up is not None:
        gate_up += b_gate_up
    out = dot(ACTIVATIONS[activation](gate_up[:, 0]) * gate_up[:, 1], w_down)
    return out if b_down is None else out + b_down
