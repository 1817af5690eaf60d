"""DecoderSpec: everything a decoder needs to know about a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, fully resolved on the host (sources: the papers named in rope_config.py).

    Attributes:
        inv_freq: one inverse frequency for each rotated pair; `2 * len(inv_freq)` dims are rotated,
            the rest of the head passes through (partial rotary).
        attention_factor: cos and sin are multiplied by it (yarn, longrope; else 1).
        max_len: positions for which these frequencies are valid, or None for no limit.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    max_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer. Letters: L layers, E hidden, H query heads, K kv heads, D head dim,
    F mlp, V vocab (rows of the embedding, which may exceed the tokenizer's).

    Attributes:
        layer_windows: one entry a layer: sliding window in tokens, or None for full attention. A token
            at position p sees positions (p - window, p].
        layer_uses_rope: one entry a layer (SmolLM3 leaves rope out of some layers).
        attn_scale: factor on q.k before the softmax.
        norm_plus_one: RMSNorm multiplies with (1 + weight) (Gemma).
        post_norms: norms after attention and after the MLP, before the residual addition (Gemma 2).
        embed_scale: factor on the embeddings.
        attn_softcap, final_softcap: tanh soft caps on the scores and on the logits.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    activation: Activation = "silu"
    attn_scale: float
    layer_windows: tuple[int | None, ...]
    layer_uses_rope: tuple[bool, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    final_softcap: float | None = None

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads
