"""Typed reading of a Hugging Face config: a missing or odd value becomes a CheckpointError that names its key.

null counts as absent everywhere, as in the config classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError

HFConfig = Mapping[str, Any]

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
MAX_LAYERS = 10_000  # beyond it a config is nonsense, and what is made for each layer would fill the memory


def get_int(config: HFConfig, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    """A positive integer; without a default the key must be there."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong("config", key, "a positive integer", value)
    if value > most:
        raise _wrong("config", key, f"at most {most}", value)
    return value


def get_num_layers(config: HFConfig) -> int:
    return get_int(config, "num_hidden_layers", most=MAX_LAYERS)


def get_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """A positive number that float32 can hold; without a default the key must be there."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _wrong("config", key, "a positive number", value)
    if not _TINY <= value <= _HUGE:
        raise _wrong("config", key, f"from {_TINY:.2g} to {_HUGE:.2g}, as float32 has them", value)
    return float(value)


def get_str(config: HFConfig, key: str, default: str | None = None) -> str:
    """A text; without a default the key must be there."""
    value = _get(config, key, default)
    if not isinstance(value, str):
        raise _wrong("config", key, "a text", value)
    return value


def get_strings(config: HFConfig, key: str) -> list[str] | None:
    """A list of texts, None if absent."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise _wrong("config", key, "a list of texts", value)
    return list(value)


def get_token_ids(config: HFConfig, key: str, file: str = "config") -> list[int]:
    """An id or a list of ids as a list; empty if absent. Ids without a row of the embedding are let through."""
    value = config.get(key)
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise _wrong(file, key, "a token id or a list of token ids", value)
    return ids


def get_bool(config: HFConfig, key: str, default: bool) -> bool:
    value = _get(config, key, default)
    if not isinstance(value, bool):
        raise _wrong("config", key, "true or false", value)
    return value


def get_optional_int(config: HFConfig, key: str) -> int | None:
    return None if config.get(key) is None else get_int(config, key)


def get_optional_float(config: HFConfig, key: str) -> float | None:
    return None if config.get(key) is None else get_float(config, key)


def _wrong(file: str, key: str, kind: str, value: Any) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(f"{file}: {key} must be {kind}, got {shown if len(shown) <= 80 else shown[:80] + '...'}")


def _get(config: HFConfig, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is None:
        raise CheckpointError(f"config: {key} is missing; the checkpoint's config.json must state it")
    return default
