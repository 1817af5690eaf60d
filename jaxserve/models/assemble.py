"""Parameters from named tensors that are already in memory."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import jax
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.placement import NameMap
from jaxserve.models.registry import ignorable
from jaxserve.models.spec import DecoderSpec


def check_tensors(spec: DecoderSpec, name_map: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks a checkpoint's tensor names and shapes against the name map.

    Raises:
        CheckpointError: naming tensors that are missing, not known, or of another shape.
    """
    missing = [name for name in name_map if name not in shapes]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} of {len(name_map)} tensors: {_some(missing)}")
    unknown = [name for name in shapes if name not in name_map and not ignorable(name, spec)]
    if unknown:
        raise CheckpointError(f"the checkpoint has {len(unknown)} tensor(s) that {spec.name} models do not have: "
                              f"{_some(unknown)}")
    for name, placements in name_map.items():
        if tuple(shapes[name]) != placements[0].shape:
            raise CheckpointError(f"tensor {name} has shape {list(shapes[name])}; the config asks for "
                                  f"{list(placements[0].shape)}")


def assemble(spec: DecoderSpec, name_map: NameMap, tensors: Mapping[str, np.ndarray], dtype) -> DecoderParams:
    """DecoderParams of numpy arrays, filled from checkpoint tensors and converted to `dtype`.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    check_tensors(spec, name_map, {name: tensor.shape for name, tensor in tensors.items()})
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract_params(spec, dtype))
    for name, placements in name_map.items():
        for placement in placements:
            attrgetter(placement.leaf)(params)[placement.index] = placement.to_leaf(tensors[name])
    return params


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
