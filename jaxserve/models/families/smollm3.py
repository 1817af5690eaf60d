"""SmolLM3: Llama in which every fourth layer goes without rope."""

from __future__ import annotations

from jaxserve.errors import CheckpointError
from jaxserve.models.families.base import Family, attention_biases, base_spec, windows_by_type
from jaxserve.models.families.names import base_names
from jaxserve.models.hf_config import HFConfig, get_bool, get_int, get_num_layers, get_optional_int, get_strings
from jaxserve.models.spec import DecoderSpec


def _spec(config: HFConfig, max_model_len: int) -> DecoderSpec:
    num_layers = get_num_layers(config)
    uses_rope = _layers_with_rope(config, num_layers)
    window = get_optional_int(config, "sliding_window")
    layer_types = get_strings(config, "layer_types")
    if layer_types is None:
        slides = window is not None and get_bool(config, "use_sliding_window", False)
        layer_types = ["sliding_attention" if slides and not rope else "full_attention" for rope in uses_rope]
    return base_spec(config, max_model_len, **attention_biases(config), mlp_bias=get_bool(config, "mlp_bias", False),
                     layer_uses_rope=uses_rope, layer_windows=windows_by_type(layer_types, window, num_layers))


def _layers_with_rope(config: HFConfig, num_layers: int) -> tuple[bool, ...]:
    flags = config.get("no_rope_layers")  # in spite of its name, 1 means that the layer has rope
    if flags is None:
        interval = get_int(config, "no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if not isinstance(flags, list | tuple) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(f"config: no_rope_layers must list a 0 or 1 for each of {num_layers} layers, "
                              f"got {flags!r:.200}")
    return tuple(bool(flag) for flag in flags[:num_layers])


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", {"tie_word_embeddings": True, "rope_theta": 2_000_000.0}, _spec,
                 base_names)
