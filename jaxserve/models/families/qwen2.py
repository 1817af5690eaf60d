"""Qwen 2 and 2.5: Llama with biases on q, k and v; the upper layers may have a sliding window."""

from __future__ import annotations

from jaxserve.errors import CheckpointError
from jaxserve.models.families.base import Family, base_spec, windows_by_type
from jaxserve.models.families.names import base_names
from jaxserve.models.hf_config import HFConfig, get_bool, get_num_layers, get_optional_int, get_strings
from jaxserve.models.spec import DecoderSpec

WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def qwen_windows(config: HFConfig) -> tuple[int | None, ...]:
    """`layer_windows`: with use_sliding_window, the layers from max_window_layers on, unless layer_types says which."""
    num_layers = get_num_layers(config)
    window = get_optional_int(config, "sliding_window") if get_bool(config, "use_sliding_window", False) else None
    layer_types = get_strings(config, "layer_types")
    if layer_types is None:
        first = config["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int):
            raise CheckpointError(f"config: max_window_layers must be an integer, got {first!r:.80}")
        layer_types = ["sliding_attention" if window is not None and i >= first else "full_attention"
                       for i in range(num_layers)]
    return windows_by_type(layer_types, window, num_layers)


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    return base_spec(config, max_model_len, qkv_bias=True, layer_windows=qwen_windows(config))


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", WINDOW_DEFAULTS, _spec, base_names)
