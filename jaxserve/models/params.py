"""The decoder's parameters as pytrees, and their abstract shapes.

Matrices are stored `[in, out...]` and stacked over layers, so the decoder is one `lax.scan` and the
pytree has about ten leaves (dispatch cost grows with leaves). Q, K and V of one kv head lie together:
`wqkv[l, :, k]` holds the group's G query heads, then its key, then its value. One matmul makes all
three, and tensor parallelism shards the kv-head axis.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxserve.models.spec import DecoderSpec


@struct.dataclass
class LayerParams:
    """Every leaf is stacked over the layers. None: the model has no such tensor."""

    attn_norm: jax.Array              # [L, E]
    wqkv: jax.Array                   # [L, E, K, G+2, D]
    wo: jax.Array                     # [L, H, D, E]
    mlp_norm: jax.Array               # [L, E]
    w_gate_up: jax.Array              # [L, E, 2, F]  gate, then up
    w_down: jax.Array                 # [L, F, E]
    bqkv: jax.Array | None = None     # [L, K, G+2, D]
    bo: jax.Array | None = None       # [L, E]
    b_gate_up: jax.Array | None = None  # [L, 2, F]
    b_down: jax.Array | None = None   # [L, E]
    q_norm: jax.Array | None = None   # [L, D]
    k_norm: jax.Array | None = None   # [L, D]
    post_attn_norm: jax.Array | None = None  # [L, E]
    post_mlp_norm: jax.Array | None = None   # [L, E]


@struct.dataclass
class DecoderParams:
    embed: jax.Array                  # [V, E]
    layers: LayerParams
    final_norm: jax.Array             # [E]
    lm_head: jax.Array | None = None  # [V, E]; None when tied to the embedding


def abstract_params(spec: DecoderSpec, dtype) -> DecoderParams:
    """The parameters of `spec` as ShapeDtypeStructs of `dtype`: what a loader must fill."""
    L, E, H, K, D, F, V = (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads,
                           spec.head_dim, spec.mlp_size, spec.vocab_size)
    G = spec.heads_per_kv

    def leaf(*shape: int, present: bool = True) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if present else None

    return DecoderParams(
        embed=leaf(V, E),
        layers=LayerParams(
            attn_norm=leaf(L, E), wqkv=leaf(L, E, K, G + 2, D), wo=leaf(L, H, D, E), mlp_norm=leaf(L, E),
            w_gate_up=leaf(L, E, 2, F), w_down=leaf(L, F, E),
            bqkv=leaf(L, K, G + 2, D, present=spec.qkv_bias), bo=leaf(L, E, present=spec.out_bias),
            b_gate_up=leaf(L, 2, F, present=spec.mlp_bias), b_down=leaf(L, E, present=spec.mlp_bias),
            q_norm=leaf(L, D, present=spec.qk_norm), k_norm=leaf(L, D, present=spec.qk_norm),
            post_attn_norm=leaf(L, E, present=spec.post_norms), post_mlp_norm=leaf(L, E, present=spec.post_norms),
        ),
        final_norm=leaf(E),
        lm_head=leaf(V, E, present=not spec.tie_embeddings),
    )


def bits_as_bfloat16(layer: LayerParams) -> LayerParams:
    """One layer of parameters, of which the step was given bfloat16 ones as uint16 bits.

    It is on CPUs, where that changes the speed and nothing else. XLA's CPU backend of jax 0.10 moves the widening of a
    layer's weights out of the loop over layers, and so makes a float32 copy of the whole stack in every step; it
    cannot move it past a change of type. At SmolLM2-135M's shape on two Zen 4 cores, 8 rows: 230 ms a step with
    431 MB of temporaries becomes 26 ms with 6 MB. The arrays must arrive as uint16: to reinterpret a stack inside
    the program copies it, and so does slicing it statically, which is why unrolling the layers is no way out.
    """
    def from_bits(leaf: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf

    return jax.tree.map(from_bits, layer)
