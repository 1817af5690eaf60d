"""The tiny models whose logits transformers computed once; see scripts/make_goldens.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PROMPT_LEN = 24
PREFILL_POSITIONS = (0, 11, 17, 23)  # of one pass over the whole prompt
DECODE_POSITIONS = (21, 22, 23)      # of single-token passes over transformers' cache


@dataclass(frozen=True)
class Case:
    """A config.json, and the longest sequence the engine would be asked for (longrope depends on it)."""

    config: dict[str, Any]
    max_model_len: int | None = None


def prompt(config: dict[str, Any]) -> np.ndarray:
    return np.random.default_rng(7).integers(0, config["vocab_size"], PROMPT_LEN, dtype=np.int32)


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    base = dict(vocab_size=259, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64, rms_norm_eps=1e-5,
                tie_word_embeddings=False, rope_theta=10000.0)
    return {"architectures": [architecture], "model_type": model_type, **base, **changes}


def llama(**changes: Any) -> dict[str, Any]:
    return _config("LlamaForCausalLM", "llama", **changes)


def mistral(**changes: Any) -> dict[str, Any]:
    return _config("MistralForCausalLM", "mistral", **changes)


def smollm3(**changes: Any) -> dict[str, Any]:
    return _config("SmolLM3ForCausalLM", "smollm3", **{
        "num_hidden_layers": 4, "rope_theta": 50000.0, "pad_token_id": 0, **changes})


def qwen2(**changes: Any) -> dict[str, Any]:
    return _config("Qwen2ForCausalLM", "qwen2", **changes)


def qwen3(**changes: Any) -> dict[str, Any]:
    return _config("Qwen3ForCausalLM", "qwen3", **{"head_dim": 64, **changes})


def gemma2(**changes: Any) -> dict[str, Any]:
    return _config("Gemma2ForCausalLM", "gemma2", **{
        "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, **changes})


def phi3(**changes: Any) -> dict[str, Any]:
    return _config("Phi3ForCausalLM", "phi3", **{"pad_token_id": 0, "eos_token_id": 0, **changes})


_LONGROPE = {"type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(9)],
             "long_factor": [1.5 + 0.5 * i for i in range(9)]}

CASES: dict[str, Case] = {
    # Heads: 9 over 3 as in SmolLM2 (head_dim 64, H*D != E), 6 over 2 of 80, 3 over 1 of 96, 5 over 5 of 128.
    "llama-heads-9-3-dim-64": Case(llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                                         tie_word_embeddings=True)),
    "llama-biases": Case(llama(attention_bias=True, mlp_bias=True)),
    "llama-heads-6-2-dim-80-linear": Case(llama(num_attention_heads=6, head_dim=80,
                                                rope_scaling={"type": "linear", "factor": 4.0})),
    "llama-llama3": Case(llama(rope_theta=500.0, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16})),
    "llama-dynamic": Case(llama(rope_scaling={"type": "dynamic", "factor": 2.0})),
    "mistral-window": Case(mistral(sliding_window=7)),
    "mistral-heads-3-1-dim-96": Case(mistral(num_attention_heads=3, num_key_value_heads=1, head_dim=96,
                                             sliding_window=None)),
    "smollm3": Case(smollm3(tie_word_embeddings=True)),
    "smollm3-window-biases": Case(smollm3(attention_bias=True, mlp_bias=True, use_sliding_window=True,
                                          sliding_window=5, no_rope_layers=[1, 0, 0, 1])),
    "qwen2": Case(qwen2(tie_word_embeddings=True, hidden_size=60, num_attention_heads=6, num_key_value_heads=3)),
    "qwen2-window-yarn": Case(qwen2(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})),
    "qwen3-heads-5-5-dim-128": Case(qwen3(num_attention_heads=5, num_key_value_heads=5, head_dim=128,
                                          attention_bias=True)),
    "qwen3-rope-parameters": Case({k: v for k, v in qwen3(rope_parameters={
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}).items() if k != "rope_theta"}),
    "gemma2": Case(gemma2(sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
                          final_logit_softcapping=3.0)),
    "gemma2-layer-types": Case(gemma2(
        hidden_size=60, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=3, sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attn_logit_softcapping=None,
        final_logit_softcapping=None, tie_word_embeddings=False)),
    "phi3": Case(phi3(hidden_size=60, num_attention_heads=6, num_key_value_heads=2, sliding_window=8)),
    "phi3-partial-rotary": Case(phi3(hidden_size=96, partial_rotary_factor=0.75, tie_word_embeddings=True)),
    "phi3-longrope-long": Case(phi3(hidden_size=96, partial_rotary_factor=0.75, rope_scaling=_LONGROPE,
                                    original_max_position_embeddings=16)),
    "phi3-longrope-short": Case(phi3(hidden_size=96, partial_rotary_factor=0.75, rope_scaling=_LONGROPE,
                                     original_max_position_embeddings=32), max_model_len=32),
}

_BASE = dict(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=4096, rope_theta=10000.0)
_PAIRS = 32


def _rope(original: int | None = None, **scaling: Any) -> dict[str, Any]:
    nested = {} if original is None else {"original_max_position_embeddings": original}
    return {**_BASE, "rope_scaling": {**scaling, **nested}}


# Configs whose inverse frequencies and attention factor are compared. (config, sequence length)
ROPE_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "default": (dict(_BASE), 4096),
    "theta-500000": ({**_BASE, "rope_theta": 500000.0}, 4096),
    "linear": (_rope(rope_type="linear", factor=3.0), 4096),
    "dynamic": (_rope(rope_type="dynamic", factor=3.0), 4096),
    "llama3": (_rope(1024, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), 4096),
    "yarn": (_rope(1024, rope_type="yarn", factor=4.0), 4096),
    "yarn-untruncated": (_rope(1024, rope_type="yarn", factor=4.0, truncate=False), 4096),
    "yarn-betas": (_rope(1024, rope_type="yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0), 4096),
    "yarn-mscale": (_rope(1024, rope_type="yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0), 4096),
    "yarn-mscale-alone": (_rope(1024, rope_type="yarn", factor=40.0, mscale=0.707), 4096),
    "yarn-attention-factor": (_rope(1024, rope_type="yarn", factor=4.0, attention_factor=0.9), 4096),
    "yarn-original-length-outside": ({**_rope(4096, rope_type="yarn", factor=4.0),
                                      "original_max_position_embeddings": 1024}, 4096),
    "yarn-no-original-length": (_rope(rope_type="yarn", factor=4.0), 4096),
    "yarn-partial": ({**_rope(1024, rope_type="yarn", factor=4.0), "partial_rotary_factor": 0.5}, 4096),
    "longrope-short": (_rope(1024, rope_type="longrope", short_factor=[1.0 + i / 64 for i in range(_PAIRS)],
                             long_factor=[1.0 + i for i in range(_PAIRS)]), 1024),
    "longrope-long": (_rope(1024, rope_type="longrope", short_factor=[1.0 + i / 64 for i in range(_PAIRS)],
                            long_factor=[1.0 + i for i in range(_PAIRS)]), 4096),
    "longrope-factor": (_rope(1024, rope_type="longrope", factor=16.0, short_factor=[1.0] * _PAIRS,
                              long_factor=[2.0] * _PAIRS), 4096),
    "longrope-attention-factor": (_rope(1024, rope_type="longrope", attention_factor=1.25,
                                        short_factor=[1.0] * _PAIRS, long_factor=[2.0] * _PAIRS), 4096),
}
