"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused projections, partial rotary and longrope."""

from __future__ import annotations

from jaxserve.models.families.base import Family, base_spec
from jaxserve.models.families.names import ALL, base_names, place
from jaxserve.models.hf_config import HFConfig, get_num_layers, get_optional_int
from jaxserve.models.placement import NameMap, Placement
from jaxserve.models.spec import DecoderSpec

_DEFAULTS = {"num_key_value_heads": None, "original_max_position_embeddings": 4096, "sliding_window": None}
_ROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}  # what early releases of Phi-3 called it


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    num_layers = get_num_layers(config)
    return base_spec(config, max_model_len, rope_aliases=_ROPE_ALIASES, partial_rotary=True,
                     layer_windows=(get_optional_int(config, "sliding_window"),) * num_layers)


def _fused_qkv(spec: DecoderSpec, i: int) -> NameMap:
    E, H, K, D, G = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.heads_per_kv
    shape = ((H + 2 * K) * D, E)  # rows of all queries, then all keys, then all values

    def rows(first_head: int, heads: int, row: int) -> Placement:
        first, last = first_head * D, (first_head + heads) * D
        return Placement("layers.wqkv", (i, ALL, ALL, row), shape,
                         lambda t: t[first:last].reshape(K, D, E).transpose(2, 0, 1))

    query = place("layers.wqkv", (i, ALL, ALL, slice(0, G)), shape,
                  lambda t: t[:H * D].reshape(K, G, D, E).transpose(3, 0, 1, 2))
    return {"self_attn.qkv_proj.weight": (*query, rows(H, K, G), rows(H + K, K, G + 1))}


def _fused_gate_up(spec: DecoderSpec, i: int) -> NameMap:
    E, F = spec.hidden_size, spec.mlp_size
    return {"mlp.gate_up_proj.weight": place("layers.w_gate_up", (i,), (2 * F, E),
                                             lambda t: t.reshape(2, F, E).transpose(2, 0, 1))}


def _names(spec: DecoderSpec) -> NameMap:
    return base_names(spec, qkv=_fused_qkv, gate_up=_fused_gate_up)


PHI3 = Family("Phi3ForCausalLM", "phi3", _DEFAULTS, _spec, _names)
