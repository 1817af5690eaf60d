"""Which model families there are, and the way from a Hugging Face config to a spec and a name map."""

from __future__ import annotations

from jaxserve.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxserve.models.families.base import Family
from jaxserve.models.families.gemma2 import GEMMA2
from jaxserve.models.families.llama import LLAMA
from jaxserve.models.families.mistral import MISTRAL
from jaxserve.models.families.phi3 import PHI3
from jaxserve.models.families.qwen2 import QWEN2
from jaxserve.models.families.qwen3 import QWEN3
from jaxserve.models.families.smollm3 import SMOLLM3
from jaxserve.models.hf_config import HFConfig, get_int, get_str, get_strings
from jaxserve.models.placement import NameMap
from jaxserve.models.spec import DecoderSpec

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, SMOLLM3, QWEN2, QWEN3, GEMMA2, PHI3)


def resolve(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """The spec of the model that a config.json describes.

    Args:
        config: the content of config.json.
        max_model_len: longest sequence that will be run, prompt and output together; some kinds of rope depend
            on it. None: the model's own limit, `max_position_embeddings`.

    Raises:
        UnsupportedModelError: the architecture, or something in the config, is not implemented.
        CheckpointError: a key is missing or malformed.
        ConfigError: max_model_len is beyond what the model's rope can do.
    """
    family = _family(config)
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError("the checkpoint is quantized (quantization_config in its config.json), which "
                                    "jaxserve does not support; use the unquantized checkpoint, or a GGUF file")
    config = {"model_type": family.model_type, **family.defaults, **config}
    limit = get_int(config, "max_position_embeddings")
    spec = family.spec(config, limit if max_model_len is None else max_model_len)
    if max_model_len is not None and spec.rope.max_len is not None and max_model_len > spec.rope.max_len:
        raise ConfigError(f"max_model_len={max_model_len} is longer than {spec.rope.max_len}, up to which this "
                          "model's rope scaling keeps its frequencies fixed; set max_model_len to at most that")
    return spec


def name_map(config: HFConfig, spec: DecoderSpec) -> NameMap:
    """Where each tensor of the checkpoint goes. A checkpoint has exactly these, and perhaps `ignorable` ones."""
    return _family(config).names(spec)


def ignorable(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor that the name map does not have may be left unread without harm."""
    if name == "lm_head.weight":
        return spec.tie_embeddings  # some exports repeat the embedding here
    return name.endswith("rotary_emb.inv_freq")  # old exports keep the rope frequencies, which the config gives


def _family(config: HFConfig) -> Family:
    architectures = get_strings(config, "architectures") or []
    model_type = None if config.get("model_type") is None else get_str(config, "model_type")
    for family in FAMILIES:
        if family.architecture in architectures or (not architectures and family.model_type == model_type):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    if not architectures and model_type is None:
        raise CheckpointError(f"config: architectures is missing; supported architectures: {supported}")
    asked = ", ".join(architectures) or f"model_type {model_type}"
    raise UnsupportedModelError(f"{asked} is not supported; supported architectures: {supported}")
