"""Qwen 3 (dense): Qwen 2 with norms on q and k in place of the biases."""

from __future__ import annotations

from jaxserve.models.families.base import Family, attention_biases, base_spec
from jaxserve.models.families.names import base_names
from jaxserve.models.families.qwen2 import WINDOW_DEFAULTS, qwen_windows
from jaxserve.models.hf_config import HFConfig
from jaxserve.models.spec import DecoderSpec


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    return base_spec(config, max_model_len, **attention_biases(config), qk_norm=True,
                     layer_windows=qwen_windows(config))


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", {**WINDOW_DEFAULTS, "head_dim": 128}, _spec, base_names)
