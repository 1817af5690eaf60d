"""The one decoder. A model family is data for it: a DecoderSpec and DecoderParams.

Letters in shapes as in `DecoderSpec`; T is tokens in the step, R rows that need logits, G = H / K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.linear import LayerOf, dot
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import apply_rope, cos_sin
from jaxserve.models.params import DecoderParams, LayerParams, bits_as_bfloat16
from jaxserve.models.spec import DecoderSpec

KV = TypeVar("KV")
# (q [T, H, D], k [T, K, D], v [T, K, D], kv, layer, window) -> (out [T, H, D], kv).
# q, k, v are in the parameters' dtype and carry their rotation; attend stores k and v, masks, and applies the
# spec's attn_scale and attn_softcap. layer and window are int32 scalars; window is None when no layer has one.
Attend = Callable[[jax.Array, jax.Array, jax.Array, KV, jax.Array, jax.Array | None], tuple[jax.Array, KV]]

# The window of a full-attention layer in a model that has both kinds: beyond any position, and far enough
# from the int32 limit that `position - window` cannot wrap around.
NO_WINDOW = 1 << 30


# The matrices of a layer: nearly all of its bytes.
MATRICES = ("wqkv", "wo", "w_gate_up", "w_down")


def decode_tokens(spec: DecoderSpec, params: DecoderParams, token_ids: jax.Array, positions: jax.Array, kv: KV,
                  attend: Attend[KV], native_linear: bool = False) -> tuple[jax.Array, KV]:
    """Runs T tokens, of any number of sequences, through all layers.

    Pure. What the tokens see of each other and of the past is `attend`'s business.

    Args:
        params: as they are, or with the layers' bfloat16 weights as uint16; see `bits_as_bfloat16`.
        token_ids: int32 `[T]`.
        positions: int32 `[T]`, each token's position in its own sequence.
        kv: any pytree; it is carried through the layers, so a donated one is updated in place.
        native_linear: multiply with the native CPU kernel, which reads the stacks where they lie. One device only.

    Returns:
        The hidden states after the final norm, float32 `[T, E]`, and the new kv.
    """
    cos, sin = cos_sin(spec.rope.inv_freq, spec.rope.attention_factor, positions)

    def body(carry, inputs):
        x, kv = carry
        layer, index, window, uses_rope = inputs
        layer = bits_as_bfloat16(layer)
        layer = dataclasses.replace(layer, **{name: LayerOf(stack, index) for name, stack in unsliced.items()})
        window = shared_window if window is None else window
        rotation = cos, sin
        if uses_rope is not None:  # rotation by the angle zero leaves q and k as they are
            rotation = jnp.where(uses_rope, cos, 1.0), jnp.where(uses_rope, sin, 0.0)
        return _layer(spec, layer, x, kv, attend, index, window, rotation), None

    # What all layers share is a constant of the loop's body; only what differs is an input of it.
    windows = [NO_WINDOW if window is None else window for window in spec.layer_windows]
    no_windows, same_window = set(spec.layer_windows) == {None}, len(set(windows)) == 1
    shared_window = None if no_windows else jnp.int32(windows[0])
    layers, unsliced = params.layers, {}
    if native_linear:
        unsliced = {name: getattr(layers, name) for name in MATRICES}
        layers = dataclasses.replace(layers, **dict.fromkeys(MATRICES))
    elif token_ids.shape[0] == 1:
        layers = _one_row_layout(layers)
    inputs = (layers, jnp.arange(spec.num_layers, dtype=jnp.int32),
              None if same_window else jnp.asarray(windows, jnp.int32),
              None if all(spec.layer_uses_rope) else jnp.asarray(spec.layer_uses_rope))
    x = embed(params.embed, token_ids, spec.embed_scale)
    (x, kv), _ = lax.scan(body, (x, kv), inputs)
    return rms_norm(x, params.final_norm, spec.norm_eps, spec.norm_plus_one), kv


def logits(spec: DecoderSpec, params: DecoderParams, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states `[R, E]`: float32 `[R, V]`, soft-capped if the model does so."""
    table = params.embed if params.lm_head is None else params.lm_head
    return unembed(table, hidden, spec.final_softcap)


def _one_row_layout(layers: LayerParams) -> LayerParams:
    """Weights with several output axes as plain matrices `[L, E, out]`.

    jax 0.12's CPU backend leaves its fast path when one row meets a matrix that was reshaped inside the loop: 144 ms
    a step instead of 25 for float32 at SmolLM2-135M's shape on two Zen 4 cores. Only for one row, because the
    reshape would hide from the partitioner the axis that tensor parallelism shards.
    """
    L, E = layers.attn_norm.shape
    return dataclasses.replace(layers, wqkv=layers.wqkv.reshape(L, E, -1),
                               w_gate_up=layers.w_gate_up.reshape(L, E, -1))


def _layer(spec: DecoderSpec, layer: LayerParams, x: jax.Array, kv: KV, attend: Attend[KV], index: jax.Array,
           window: jax.Array | None, rotation: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, KV]:
    def norm(y: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(y, weight, spec.norm_eps, spec.norm_plus_one)

    q, k, v = _qkv(spec, layer, norm(x, layer.attn_norm), rotation)
    out, kv = attend(q, k, v, kv, index, window)  # [T, H, D]
    out = dot(out, layer.wo, axes=2)  # [T, E]
    if layer.bo is not None:
        out += layer.bo
    x += out if layer.post_attn_norm is None else norm(out, layer.post_attn_norm)

    out = gated_mlp(norm(x, layer.mlp_norm), layer.w_gate_up, layer.w_down, layer.b_gate_up, layer.b_down,
                    spec.activation)
    x += out if layer.post_mlp_norm is None else norm(out, layer.post_mlp_norm)
    return x, kv


def _qkv(spec: DecoderSpec, layer: LayerParams, x: jax.Array, rotation: tuple[jax.Array, jax.Array]):
    """x `[T, E]` -> q `[T, H, D]`, k and v `[T, K, D]` in the parameters' dtype. Query head h reads kv head h // G."""
    G = spec.heads_per_kv
    qkv = dot(x, layer.wqkv).reshape(-1, spec.num_kv_heads, G + 2, spec.head_dim)  # [T, K, G+2, D]
    if layer.bqkv is not None:
        qkv += layer.bqkv
    q = qkv[:, :, :G].reshape(-1, spec.num_heads, spec.head_dim)
    k, v = qkv[:, :, G], qkv[:, :, G + 1]
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, spec.norm_eps, spec.norm_plus_one)
        k = rms_norm(k, layer.k_norm, spec.norm_eps, spec.norm_plus_one)
    q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
    dtype = layer.wqkv.dtype
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)
