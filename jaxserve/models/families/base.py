"""What all families share: most decoders are Llama with a few values changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.hf_config import HFConfig, get_bool, get_float, get_int, get_num_layers, get_str
from jaxserve.models.placement import NameMap
from jaxserve.models.rope_config import resolve_rope
from jaxserve.models.spec import Activation, DecoderSpec


@dataclass(frozen=True)
class Family:
    """A model family: its Hugging Face names, and how to read its configs and tensors.

    Attributes:
        architecture: as in `architectures` of config.json.
        model_type: as in `model_type` of config.json.
        defaults: values that the family's config class in transformers gives to absent keys. Exports may leave
            out what equals them, so an absent key is not always an error.
        spec: (config with the defaults filled in, longest sequence) -> DecoderSpec.
        names: spec -> where each tensor of the checkpoint goes.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    spec: Callable[[HFConfig, int], DecoderSpec]
    names: Callable[[DecoderSpec], NameMap]


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}


def base_spec(config: HFConfig, max_model_len: int, *, rope_aliases: Mapping[str, str] | None = None,
              partial_rotary: bool = False, **changes: Any) -> DecoderSpec:
    """The spec of a Llama-like decoder without biases and windows; `changes` are the DecoderSpec fields that differ.

    Args:
        rope_aliases: other names of rope types, see `resolve_rope`.
        partial_rotary: whether transformers honours `partial_rotary_factor` in this family.
    """
    num_heads = get_int(config, "num_attention_heads")
    # null means one kv head for each query head; absent is an error unless the family's defaults have null.
    kv_default = num_heads if "num_key_value_heads" in config else None
    num_kv_heads = get_int(config, "num_key_value_heads", kv_default)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                              f"({num_kv_heads})")
    hidden_size = get_int(config, "hidden_size")
    head_dim = get_int(config, "head_dim", hidden_size // num_heads)
    num_layers = get_num_layers(config)
    rope = resolve_rope(config, head_dim=head_dim, max_model_len=max_model_len, type_aliases=rope_aliases)
    if not partial_rotary and 2 * len(rope.inv_freq) != head_dim:
        raise UnsupportedModelError(f"rope rotates {2 * len(rope.inv_freq)} of {head_dim} dims (see "
                                    f"partial_rotary_factor), which {config['model_type']} models do not do")
    activation = get_str(config, "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")

    fields: dict[str, Any] = dict(
        name=config["model_type"], num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, mlp_size=get_int(config, "intermediate_size"),
        vocab_size=get_int(config, "vocab_size"), max_position=get_int(config, "max_position_embeddings"),
        norm_eps=get_float(config, "rms_norm_eps"), rope=rope, activation=_ACTIVATIONS[activation],
        attn_scale=head_dim ** -0.5, layer_windows=(None,) * num_layers, layer_uses_rope=(True,) * num_layers,
        tie_embeddings=get_bool(config, "tie_word_embeddings", False),
    )
    return DecoderSpec(**(fields | changes))


def attention_biases(config: HFConfig) -> dict[str, Any]:
    """The spec fields behind `attention_bias`: it puts biases on all four projections of attention."""
    bias = get_bool(config, "attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def windows_by_type(layer_types: Sequence[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """`layer_windows` from a config's `layer_types`; `window` is that of the sliding layers."""
    if len(layer_types) != num_layers:
        raise CheckpointError(f"config: layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer type(s) {', '.join(unknown)} are not supported; supported: "
                                    "full_attention, sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise CheckpointError("config: layer_types has sliding_attention, but sliding_window is not set (or "
                              "use_sliding_window is false)")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
