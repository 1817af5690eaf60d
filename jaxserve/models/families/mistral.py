"""Mistral: Llama with one sliding window for all layers (absent in later releases)."""

from __future__ import annotations

from jaxserve.models.families.base import Family, base_spec
from jaxserve.models.families.names import base_names
from jaxserve.models.hf_config import HFConfig, get_num_layers, get_optional_int
from jaxserve.models.spec import DecoderSpec


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    num_layers = get_num_layers(config)
    return base_spec(config, max_model_len, layer_windows=(get_optional_int(config, "sliding_window"),) * num_layers)


MISTRAL = Family("MistralForCausalLM", "mistral", {"sliding_window": 4096}, _spec, base_names)
