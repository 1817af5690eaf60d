"""A GGUF file as a Hugging Face checkpoint: its config, its tensors by their Hugging Face names.

What llama.cpp's converter did to a checkpoint is undone: names, the reordering of q and k rows for its
interleaved rope (llama and smollm3), Gemma's norm weights that it stores with 1 added. Tensors are
dequantised one at a time, when they are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from gguf.quants import dequantize

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf_file
from jaxserve.weights.lazy import LazyTensor

_PLAIN = {Q.F32: np.dtype(np.float32), Q.F16: np.dtype(np.float16), Q.BF16: np.dtype(ml_dtypes.bfloat16)}
# Q5_0 and Q5_1 are what llama.cpp falls back to when the rows of a Q4_K or Q5_K file do not divide into 256.
_QUANTISED = (Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K)
_BLOCKS_PER_ROW = 256

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NAME = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """How llama.cpp writes one architecture.

    Attributes:
        model_type: of the Hugging Face config.
        permuted: q and k rows are reordered for interleaved rope.
        norm_offset: what the converter added to norm weights.
        layer_names: differences from `_LAYER`.
        config: further config entries, from (values, tensors, the config so far).
    """

    model_type: str
    class_name: str
    permuted: bool = False
    norm_offset: float = 0.0
    layer_names: Mapping[str, str]
    config: Callable[[_Values, Mapping[str, GGUFTensor], dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A GGUF file read as a checkpoint; `metadata` also describes its tokenizer.

    `dtype`: of the embedding; None if it is quantised.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    metadata: dict[str, Any]
    dtype: str | None


def open_gguf(path: Path) -> GGUFModel:
    """Reads the header of a GGUF model.

    Raises:
        CheckpointError: not a whole GGUF file, or metadata that every model has is absent.
        UnsupportedModelError: an architecture, quantisation type or rope scaling that is not supported.
    """
    file = read_gguf_file(path)
    name = str(file.metadata.get("general.architecture"))
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModelError(
            f"{path} has the architecture {name!r}; supported in GGUF: {', '.join(_ARCHITECTURES)}")
    for tensor_name, tensor in file.tensors.items():
        if tensor.type not in _PLAIN and tensor.type not in _QUANTISED:
            supported = ", ".join(q.name for q in (*_PLAIN, *_QUANTISED))
            raise UnsupportedModelError(
                f"{path}: tensor {tensor_name} is quantised as {tensor.type.name}; supported: {supported}")
    config = _config(architecture, _Values(file, name), file)
    tensors = {
        _hf_name(architecture, gguf_name): _lazy(architecture, gguf_name, tensor, config)
        for gguf_name, tensor in file.tensors.items() if gguf_name not in _ROPE_TENSORS
    }
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    dtype = _PLAIN.get(file.tensors["token_embd.weight"].type)
    return GGUFModel(config, generation, tensors, file.metadata, None if dtype is None else str(dtype))


def _hf_name(architecture: _Architecture, name: str) -> str:
    """The Hugging Face name; a name that is not known stays, and the loader reports it."""
    match = _NAME.match(name)
    if match is None:
        return name
    layer, module, kind = match.group("layer", "module", "kind")
    if layer is None:
        return f"{_TOP[module]}.{kind}" if module in _TOP else name
    hf = architecture.layer_names.get(module) or _LAYER.get(module)
    return f"model.layers.{layer}.{hf}.{kind}" if hf else name


def _lazy(architecture: _Architecture, name: str, tensor: GGUFTensor, config: Mapping[str, Any]) -> LazyTensor:
    heads = 0
    if architecture.permuted:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(
            name.split(".")[-2], 0)
    is_norm = name.endswith("norm.weight")

    def read() -> np.ndarray:
        stored = tensor.read_bytes()
        if heads:
            stored = _unpermute(stored.reshape(tensor.shape[0], -1), heads)
        values = _values(stored, tensor)
        return values - np.float32(architecture.norm_offset) if is_norm and architecture.norm_offset else values

    dtype = _PLAIN.get(tensor.type, np.dtype(np.float32))
    return LazyTensor(tensor.shape, dtype, read)


def _values(stored: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    if tensor.type in _PLAIN:
        return stored.reshape(-1).view(_PLAIN[tensor.type]).reshape(tensor.shape)
    # `dequantize` works on sixteen rows at a time, and blocks know nothing of rows: longer rows, fewer calls.
    block_bytes = GGML_QUANT_SIZES[tensor.type][1]
    row = math.gcd(stored.size // block_bytes, _BLOCKS_PER_ROW) * block_bytes
    return dequantize(stored.reshape(-1, row), tensor.type).reshape(tensor.shape)


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (still quantised: a row's bytes move as one) from the order of interleaved rope, in which a
    rotated pair is two neighbours, to that of Hugging Face, in which it is half a head apart."""
    num_rows, width = rows.shape
    pairs = rows.reshape(heads, num_rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


class _Values:
    """Typed access to the metadata of one architecture."""

    def __init__(self, file: GGUFFile, prefix: str):
        self.file, self.prefix = file, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, float):
            # Stored as float32: its shortest decimal is the number that the original config held.
            return float(str(np.float32(value)))
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:  # one value a layer, all equal
            value = value.tolist()[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        return float(value)

    def wrong(self, key: str, allowed: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.prefix}.{key} must be {allowed}, got {value!r}")


def _config(architecture: _Architecture, values: _Values, file: GGUFFile) -> dict[str, Any]:
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight, so it is not a language model's GGUF")
    if values.get("expert_count"):
        raise UnsupportedModelError(f"{file.path} is a mixture of experts, which is not supported")
    num_heads = values.integer("attention.head_count")
    hidden_size = values.integer("embedding_length")
    # Phi-3 files state neither length and older llama files only the rotated one.
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden_size,
        "intermediate_size": values.integer("feed_forward_length"),
        "num_hidden_layers": values.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    rotated = values.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(values, tensors, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
        if "original_max_position_embeddings" in scaling:  # Phi-3 configs have it at the top
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    config |= _token_ids(file.metadata)
    return config | architecture.config(values, tensors, config)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids. End of turn and end of message are ends as well, as in llama.cpp."""
    found: dict[str, Any] = {}
    for key, source in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        value = metadata.get(f"tokenizer.ggml.{source}")
        if value is not None:
            found[key] = int(value)
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(int(end) for end in ends if end is not None))
    if ends:
        found["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return found


def _rope_scaling(
    values: _Values, tensors: Mapping[str, GGUFTensor], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        # Llama 3's scaling arrives as one divisor per frequency; longrope with explicit factors says just that.
        factors = _rope_factors(tensors["rope_freqs.weight"])
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
                "original_max_position_embeddings": config["max_position_embeddings"]}
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        if not {"rope_factors_long.weight", "rope_factors_short.weight"} <= tensors.keys():
            raise CheckpointError(f"{values.file.path} has only one of rope_factors_long and rope_factors_short")
        scaling = {
            "rope_type": "longrope",
            "short_factor": _rope_factors(tensors["rope_factors_short.weight"]),
            "long_factor": _rope_factors(tensors["rope_factors_long.weight"]),
            "original_max_position_embeddings": values.integer("rope.scaling.original_context_length"),
        }
        attention_factor = values.get("rope.scaling.attn_factor")
        return scaling | ({"attention_factor": attention_factor} if attention_factor else {})
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{values.file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, and factors "
            "given as tensors")
    scaling = {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = values.get(f"rope.scaling.{theirs}")
            if value is not None:
                scaling[ours] = value
    return scaling


def _rope_factors(tensor: GGUFTensor) -> list[float]:
    return _values(tensor.read_bytes(), tensor).astype(np.float64).tolist()


def _llama(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _smollm3(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp has the interval in its code, not in the file.
    layers = config["num_hidden_layers"]
    return _llama(values, tensors, config) | {
        "no_rope_layer_interval": 4, "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "use_sliding_window": False, "layer_types": ["full_attention"] * layers}


def _qwen2(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": "blk.0.attn_q.bias" in tensors}


def _gemma2(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    # The 27B model alone scales queries by hidden size per head; the file does not say, llama.cpp goes by depth.
    is_27b = config["num_hidden_layers"] == 46
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "sliding_window": values.integer("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention"
                        for layer in range(config["num_hidden_layers"])],
    }


def _phi3(values: _Values, tensors: Mapping[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Any]:
    window = values.get("attention.sliding_window")
    return {"sliding_window": int(window) if window else None}


_ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture(model_type="llama", class_name="LlamaForCausalLM", permuted=True, layer_names={},
                           config=_llama),
    "smollm3": _Architecture(model_type="smollm3", class_name="SmolLM3ForCausalLM", permuted=True, layer_names={},
                             config=_smollm3),
    "qwen2": _Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", layer_names={}, config=_qwen2),
    "qwen3": _Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", layer_names={}, config=_qwen3),
    "gemma2": _Architecture(
        model_type="gemma2", class_name="Gemma2ForCausalLM", norm_offset=1.0, config=_gemma2,
        layer_names={"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                     "post_ffw_norm": "post_feedforward_layernorm"}),
    "phi3": _Architecture(
        model_type="phi3", class_name="Phi3ForCausalLM", config=_phi3,
        layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
