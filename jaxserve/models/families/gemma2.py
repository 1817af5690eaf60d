"""Gemma 2: soft caps, norms on both sides of each block, every other layer with a sliding window."""

from __future__ import annotations

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.families.base import Family, attention_biases, base_spec, windows_by_type
from jaxserve.models.families.names import base_names
from jaxserve.models.hf_config import (
    HFConfig,
    get_float,
    get_int,
    get_num_layers,
    get_optional_float,
    get_optional_int,
    get_str,
    get_strings,
)
from jaxserve.models.placement import NameMap
from jaxserve.models.spec import DecoderSpec

_DEFAULTS = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attn_norm",
          "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "post_mlp_norm"}


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention: jaxserve runs causal decoders only")
    num_layers = get_num_layers(config)
    layer_types = get_strings(config, "layer_types")
    if layer_types is None:
        layer_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    # Old exports also carry `hidden_act`, which says "gelu" and was never what the model was trained with.
    config = {**config, "hidden_act": get_str(config, "hidden_activation")}
    return base_spec(
        config, max_model_len, **attention_biases(config), norm_plus_one=True, post_norms=True,
        attn_scale=get_float(config, "query_pre_attn_scalar") ** -0.5,
        embed_scale=get_int(config, "hidden_size") ** 0.5,
        attn_softcap=get_optional_float(config, "attn_logit_softcapping"),
        final_softcap=get_optional_float(config, "final_logit_softcapping"),
        layer_windows=windows_by_type(layer_types, get_optional_int(config, "sliding_window"), num_layers))


def _names(spec: DecoderSpec) -> NameMap:
    return base_names(spec, norms=_NORMS)


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", _DEFAULTS, _spec, _names)
