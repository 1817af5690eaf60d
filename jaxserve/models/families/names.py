"""Where the tensors of a Llama-like checkpoint go.

Checkpoints hold matrices as `[out, in]`; the parameters are `[in, out...]`, stacked over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.models.placement import NameMap, Placement
from jaxserve.models.spec import DecoderSpec

ALL = slice(None)

# tensor name in a layer -> leaf of LayerParams
LLAMA_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}

# (spec, layer) -> names inside that layer
LayerNames = Callable[[DecoderSpec, int], NameMap]


def place(leaf: str, index: tuple[int | slice, ...], shape: tuple[int, ...],
          to_leaf: Callable[[np.ndarray], np.ndarray] = lambda t: t) -> tuple[Placement]:
    """A tensor with one place in the parameters."""
    return (Placement(leaf, index, shape, to_leaf),)


def separate_qkv(spec: DecoderSpec, i: int) -> NameMap:
    """`q_proj`, `k_proj` and `v_proj`, each with its bias if there are any."""
    E, H, K, D, G = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.heads_per_kv
    names = {
        "self_attn.q_proj.weight": place("layers.wqkv", (i, ALL, ALL, slice(0, G)), (H * D, E),
                                         lambda t: t.reshape(K, G, D, E).transpose(3, 0, 1, 2))}
    if spec.qkv_bias:
        names["self_attn.q_proj.bias"] = place("layers.bqkv", (i, ALL, slice(0, G)), (H * D,),
                                               lambda t: t.reshape(K, G, D))
    for name, row in (("k_proj", G), ("v_proj", G + 1)):
        names[f"self_attn.{name}.weight"] = place("layers.wqkv", (i, ALL, ALL, row), (K * D, E),
                                                  lambda t: t.reshape(K, D, E).transpose(2, 0, 1))
        if spec.qkv_bias:
            names[f"self_attn.{name}.bias"] = place("layers.bqkv", (i, ALL, row), (K * D,), lambda t: t.reshape(K, D))
    return names


def separate_gate_up(spec: DecoderSpec, i: int) -> NameMap:
    """`gate_proj` and `up_proj`, each with its bias if there are any."""
    names: NameMap = {}
    for row, name in enumerate(("gate_proj", "up_proj")):
        names[f"mlp.{name}.weight"] = place("layers.w_gate_up", (i, ALL, row), (spec.mlp_size, spec.hidden_size),
                                            lambda t: t.T)
        if spec.mlp_bias:
            names[f"mlp.{name}.bias"] = place("layers.b_gate_up", (i, row), (spec.mlp_size,))
    return names


def base_names(spec: DecoderSpec, *, norms: Mapping[str, str] | None = None, qkv: LayerNames = separate_qkv,
               gate_up: LayerNames = separate_gate_up) -> NameMap:
    """Tensor names as in Llama, with the biases, q/k norms and output head that the spec says are there.

    Args:
        norms: norm names inside a layer -> leaves; default `LLAMA_NORMS`.
        qkv, gate_up: for families that store these projections otherwise.
    """
    E, V = spec.hidden_size, spec.vocab_size
    names: NameMap = {"model.embed_tokens.weight": place("embed", (), (V, E)),
                      "model.norm.weight": place("final_norm", (), (E,))}
    if not spec.tie_embeddings:
        names["lm_head.weight"] = place("lm_head", (), (V, E))
    for i in range(spec.num_layers):
        layer = (qkv(spec, i) | gate_up(spec, i) | _out_and_down(spec, i)
                 | _norms(spec, i, LLAMA_NORMS if norms is None else norms))
        names |= {f"model.layers.{i}.{name}": placements for name, placements in layer.items()}
    return names


def _out_and_down(spec: DecoderSpec, i: int) -> NameMap:
    E, H, D, F = spec.hidden_size, spec.num_heads, spec.head_dim, spec.mlp_size
    names: NameMap = {
        "self_attn.o_proj.weight": place("layers.wo", (i,), (E, H * D),
                                         lambda t: t.reshape(E, H, D).transpose(1, 2, 0)),
        "mlp.down_proj.weight": place("layers.w_down", (i,), (E, F), lambda t: t.T),
    }
    if spec.out_bias:
        names["self_attn.o_proj.bias"] = place("layers.bo", (i,), (E,))
    if spec.mlp_bias:
        names["mlp.down_proj.bias"] = place("layers.b_down", (i,), (E,))
    return names


def _norms(spec: DecoderSpec, i: int, norms: Mapping[str, str]) -> NameMap:
    names: NameMap = {f"{name}.weight": place(f"layers.{leaf}", (i,), (spec.hidden_size,))
                      for name, leaf in norms.items()}
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            names[f"self_attn.{name}.weight"] = place(f"layers.{name}", (i,), (spec.head_dim,))
    return names
