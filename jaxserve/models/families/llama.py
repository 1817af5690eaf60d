"""Llama 2 and 3, and what is built like them (SmolLM2, TinyLlama, Yi)."""

from __future__ import annotations

from jaxserve.models.families.base import Family, attention_biases, base_spec
from jaxserve.models.families.names import base_names
from jaxserve.models.hf_config import HFConfig, get_bool
from jaxserve.models.spec import DecoderSpec


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    return base_spec(config, max_model_len, **attention_biases(config), mlp_bias=get_bool(config, "mlp_bias", False))


LLAMA = Family("LlamaForCausalLM", "llama", {"num_key_value_heads": None}, _spec, base_names)
