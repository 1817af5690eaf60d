"""Very small checkpoints of every family, written to disk in the formats under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file

_COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "vocab_size": 70, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], "tie_word_embeddings": False,
            **_COMMON, **changes}


LLAMA = _config("llama", "LlamaForCausalLM")
FAMILIES = {
    "llama": LLAMA,
    "smollm3": _config("smollm3", "SmolLM3ForCausalLM", tie_word_embeddings=True, num_hidden_layers=4,
                       no_rope_layer_interval=4),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", use_sliding_window=False),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", head_dim=32),
    "gemma2": _config(
        "gemma2", "Gemma2ForCausalLM", tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=16),
    "phi3": _config("phi3", "Phi3ForCausalLM", sliding_window=64, pad_token_id=0),
}


def write_hf(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """A Hugging Face directory: one file, or shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def _permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models."""
    return (weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            .swapaxes(1, 2).reshape(weights.shape))


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF as llama.cpp's converter would write it: matrices as `qtype`, the rest as F32. Names of tensors
    and keys are the gguf package's own."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if arch != "phi3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    model_arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(model_arch, config["num_hidden_layers"])
    for hf_name, tensor in tensors.items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            hf_name.split(".")[-2])
        if arch in ("llama", "smollm3") and heads:
            tensor = _permute(tensor, heads)
        if arch == "gemma2" and hf_name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(name, tensor)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
