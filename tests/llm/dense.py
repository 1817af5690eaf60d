"""A Llama in plain numpy, float64, over the whole sequence each time: no cache, no pages, no batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class DenseLlama:
    """`tensors` by their Hugging Face names. Ids from `valid_vocab` on are padding and have no probability."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], valid_vocab: int):
        self.config = config
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        self.valid_vocab = valid_vocab

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """f64 `[T, valid_vocab]`: row t is about the token at t + 1."""
        w, c = self.tensors, self.config
        x = w["model.embed_tokens.weight"][list(ids)]
        for i in range(c["num_hidden_layers"]):
            layer = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in w.items()
                     if name.startswith(f"model.layers.{i}.")}
            x = x + self._attention(layer, self._norm(x, layer["input_layernorm.weight"]))
            y = self._norm(x, layer["post_attention_layernorm.weight"])
            gate = y @ layer["mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return (self._norm(x, w["model.norm.weight"]) @ head.T)[:, :self.valid_vocab]

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """f64 `[T, valid_vocab]`: log-probabilities of the token at t + 1."""
        logits = self.logits(ids)
        top = logits.max(axis=-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` ids that follow, whatever they are (EOS does not end it)."""
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-count:]

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def _attention(self, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        c, T = self.config, len(x)
        D, K = c["head_dim"], c["num_key_value_heads"]
        q, k, v = (self._heads(x @ layer[f"self_attn.{name}_proj.weight"].T, D) for name in "qkv")  # [heads, T, D]
        k, v = (np.repeat(y, len(q) // K, axis=0) for y in (self._rotate(k), v))
        scores = self._rotate(q) @ k.transpose(0, 2, 1) / np.sqrt(D)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = weights / weights.sum(axis=-1, keepdims=True) @ v
        return out.transpose(1, 0, 2).reshape(T, -1) @ layer["self_attn.o_proj.weight"].T

    @staticmethod
    def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
        return x.reshape(len(x), -1, head_dim).transpose(1, 0, 2)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotary embedding as in Llama: dims d and d + D/2 are a pair."""
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
