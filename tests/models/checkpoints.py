"""Random checkpoints with Hugging Face names, made by numpy alone so that every environment makes the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from jaxserve.models import registry
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.spec import DecoderSpec


def random_tensor(name: str, shape: tuple[int, ...], seed: int, norm_plus_one: bool = False) -> np.ndarray:
    """One float32 tensor; it depends on its name and the seed only. Activations keep a scale of about one."""
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if len(shape) == 2:
        return values / np.float32(np.sqrt(shape[1]))
    if name.endswith("norm.weight"):
        return values * np.float32(0.1) + np.float32(0.0 if norm_plus_one else 1.0)
    return values * np.float32(0.2)  # a bias


def random_checkpoint(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors for `config` (a config.json as a dict), by their names in a Hugging Face checkpoint."""
    spec = registry.resolve(config, None)
    return {name: random_tensor(name, placements[0].shape, seed, spec.norm_plus_one)
            for name, placements in registry.name_map(config, spec).items()}


def random_params(config: Mapping[str, Any], spec: DecoderSpec, dtype: Any = np.float32,
                  seed: int = 0) -> DecoderParams:
    """`random_checkpoint` put where the name map says, as numpy arrays: what a loader must make of it."""
    tensors = random_checkpoint(config, seed)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(spec, dtype))
    for name, placements in registry.name_map(config, spec).items():
        for placement in placements:
            attrgetter(placement.leaf)(params)[placement.index] = placement.to_leaf(tensors[name])
    return params
