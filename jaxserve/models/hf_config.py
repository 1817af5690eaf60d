"""Typed reading of a Hugging Face config: a missing or odd value becomes a CheckpointError that names its key.

null counts as absent everywhere, as in the config classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

HFConfig = Mapping[str, Any]


def get_int(config: HFConfig, key: str, default: int | None = None) -> int:
    """A positive integer; without a default the key must be there."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config: {key} must be a positive integer, got {value!r}")
    return value


def get_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """A positive number; without a default the key must be there."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config: {key} must be a positive number, got {value!r}")
    return float(value)


def get_bool(config: HFConfig, key: str, default: bool) -> bool:
    value = _get(config, key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {key} must be true or false, got {value!r}")
    return value


def get_optional_int(config: HFConfig, key: str) -> int | None:
    return None if config.get(key) is None else get_int(config, key)


def get_optional_float(config: HFConfig, key: str) -> float | None:
    return None if config.get(key) is None else get_float(config, key)


def _get(config: HFConfig, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is None:
        raise CheckpointError(f"config: {key} is missing; the checkpoint's config.json must state it")
    return default
