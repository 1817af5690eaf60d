"""From the rope entries of a Hugging Face config to a RopeSpec, on the host.

Three spellings are read: `rope_theta` with `rope_scaling` (whose type is under `rope_type` or, older,
`type`), and the `rope_parameters` of transformers 5. Frequencies are worked out in float32 and in the
order of operations that transformers uses, because checkpoints are evaluated with it.

Sources: linear, kaiokendev's position interpolation (https://arxiv.org/abs/2306.15595); dynamic, NTK-aware
scaling by bloc97 and emozilla; yarn, https://arxiv.org/abs/2309.00071; longrope,
https://arxiv.org/abs/2402.13753; llama3, the Llama 3.1 reference code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.hf_config import HFConfig, get_bool, get_float, get_int, get_optional_float, get_str
from jaxserve.models.spec import RopeSpec


@dataclass(frozen=True, kw_only=True)
class _Rope:
    """The rope entries of a config, gathered from whichever spelling it uses."""

    params: Mapping[str, Any]  # what rope_scaling or rope_parameters holds
    dim: int                   # dims of the head that are rotated
    theta: float
    max_position: int
    original_max_position: int
    max_model_len: int

    def exponents(self) -> np.ndarray:
        return np.arange(0, self.dim, 2).astype(np.float32) / np.float32(self.dim)

    def wavelengths(self) -> np.ndarray:
        """theta^(2i/dim): the wavelength of each pair, over 2 pi."""
        return np.float32(self.theta) ** self.exponents()


def resolve_rope(config: HFConfig, *, head_dim: int, max_model_len: int,
                 type_aliases: Mapping[str, str] | None = None) -> RopeSpec:
    """The frequencies that this config asks for.

    Args:
        head_dim: of the attention heads.
        max_model_len: longest sequence that will be run. longrope has two sets of frequencies, for sequences up
            to the original length and for longer ones. transformers picks by the length of each call; an engine
            that reuses KV pages needs one choice, so the short set is used if no sequence can exceed the
            original length, else the long one for all.
        type_aliases: rope types by other names, per family.

    Raises:
        UnsupportedModelError: for a rope type that is not implemented, or rope that differs between layers.
        CheckpointError: for missing or malformed values.
    """
    params = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise CheckpointError(f"config: rope_scaling must be an object, got {params!r:.80}")
    if any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModelError(
            f"rope_parameters differ by layer type ({', '.join(params)}); jaxserve supports one rope for all layers")
    rope_type = get_str(params, "rope_type", get_str(params, "type", "default"))
    rope_type = (type_aliases or {}).get(rope_type, rope_type)
    if rope_type not in _TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; supported: {', '.join(_TYPES)}")

    max_position = get_int(config, "max_position_embeddings")
    rotated_share = get_float(params, "partial_rotary_factor", get_float(config, "partial_rotary_factor", 1.0))
    rope = _Rope(
        params=params, dim=int(head_dim * rotated_share), max_position=max_position, max_model_len=max_model_len,
        theta=get_float(params, "rope_theta", get_float(config, "rope_theta", 10_000.0)),
        # The top-level key wins over the nested one, as in transformers (Phi-3 has it there).
        original_max_position=get_int(config, "original_max_position_embeddings",
                                      get_int(params, "original_max_position_embeddings", max_position)))
    # An odd number of rotated dims is rounded up to whole pairs, so a head of odd size cannot be rotated whole.
    if not 2 <= rope.dim + rope.dim % 2 <= head_dim:
        raise UnsupportedModelError(f"rope would rotate {rope.dim} dims (head_dim {head_dim}, partial_rotary_factor "
                                    f"{rotated_share}); it must be from 2 to head_dim, in pairs")
    try:
        with np.errstate(all="ignore"):
            spec = _TYPES[rope_type](rope)
    except ArithmeticError:
        spec = None
    if spec is None or not np.isfinite([*spec.inv_freq, spec.attention_factor]).all():
        raise CheckpointError(f"config: rope type {rope_type!r} with rope_theta {rope.theta}, max_position_embeddings "
                              f"{max_position} and {str(params)[:200]} gives frequencies that are not numbers")
    return spec


def _spec(inv_freq: np.ndarray, attention_factor: float = 1.0, max_len: int | None = None) -> RopeSpec:
    return RopeSpec(inv_freq=tuple(inv_freq.astype(np.float32).tolist()), attention_factor=attention_factor,
                    max_len=max_len)


def _default(rope: _Rope) -> RopeSpec:
    return _spec(1.0 / rope.wavelengths())


def _linear(rope: _Rope) -> RopeSpec:
    return _spec(1.0 / rope.wavelengths() / np.float32(get_float(rope.params, "factor")))


def _dynamic(rope: _Rope) -> RopeSpec:
    # Beyond max_position_embeddings every frequency depends on how long the sequence has become, so keys that
    # lie in the cache would have to be rotated anew with each token. Up to that length nothing is scaled.
    get_float(rope.params, "factor")  # a dynamic config without one is malformed
    return _spec(1.0 / rope.wavelengths(), max_len=rope.max_position)


def _llama3(rope: _Rope) -> RopeSpec:
    factor = get_float(rope.params, "factor")
    low_freq_factor = get_float(rope.params, "low_freq_factor")
    high_freq_factor = get_float(rope.params, "high_freq_factor")
    if high_freq_factor <= low_freq_factor:
        raise CheckpointError(f"config: high_freq_factor ({high_freq_factor}) must be greater than low_freq_factor "
                              f"({low_freq_factor})")
    original = rope.original_max_position
    inv_freq = 1.0 / rope.wavelengths()
    wavelength = 2 * np.float32(math.pi) / inv_freq
    smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    long_wave = wavelength > original / low_freq_factor
    short_wave = wavelength < original / high_freq_factor
    return _spec(np.where(long_wave, inv_freq / factor, np.where(short_wave, inv_freq, blended)))


def _yarn(rope: _Rope) -> RopeSpec:
    params, dim = rope.params, rope.dim
    factor = get_float(params, "factor", rope.max_position / rope.original_max_position)
    beta_fast = get_float(params, "beta_fast", 32.0)
    beta_slow = get_float(params, "beta_slow", 1.0)

    def pair_that_rotates(times: float) -> float:
        """The pair (a fraction of an index) that makes so many full turns over the original length."""
        return dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_rotates(beta_fast), pair_that_rotates(beta_slow)
    if get_bool(params, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    # 0: a fast pair, kept as trained; 1: a slow pair, interpolated.
    ramp = np.clip((np.arange(len(rope.exponents()), dtype=np.float32) - np.float32(low)) / np.float32(high - low),
                   0, 1)
    kept = 1 - ramp
    wavelengths = rope.wavelengths()
    inv_freq = 1.0 / (np.float32(factor) * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return _spec(inv_freq, _yarn_attention_factor(params, factor))


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    explicit = get_optional_float(params, "attention_factor")
    if explicit is not None:
        return explicit
    # DeepSeek writes 0 for "none", which no other number of a rope config may be.
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(get_float(params, "mscale")) / mscale(get_float(params, "mscale_all_dim"))
    return mscale(1.0)


def _longrope(rope: _Rope) -> RopeSpec:
    original = rope.original_max_position
    factor = get_float(rope.params, "factor", rope.max_position / original)
    attention_factor = get_optional_float(rope.params, "attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = rope.max_model_len <= original
    key = "short_factor" if short else "long_factor"
    stretch = rope.params.get(key)
    pairs = len(rope.exponents())
    if not isinstance(stretch, list | tuple) or len(stretch) != pairs or not all(
            isinstance(s, int | float) and s > 0 for s in stretch):
        raise CheckpointError(f"config: {key} of longrope must be a list of {pairs} positive numbers, one for each "
                              f"rotated pair, got {stretch!r}")
    inv_freq = 1.0 / (np.asarray(stretch, np.float32) * rope.wavelengths())
    return _spec(inv_freq, attention_factor, max_len=original if short else None)


_TYPES: dict[str, Callable[[_Rope], RopeSpec]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}
