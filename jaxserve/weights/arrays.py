"""Parameters from arrays that are in memory already, in any of the three forms that users have them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.placement import NameMap
from jaxserve.models.registry import ignorable
from jaxserve.models.spec import DecoderSpec
from jaxserve.weights.lazy import LazyTensor
from jaxserve.weights.load import Shardings, leaf_paths, load_params, sharding_of, sharding_of_leaves

# Dotted nnx path -> Hugging Face name, or that and the way from the nnx array to Hugging Face's layout.
NnxNames = Mapping[str, str | tuple[str, Callable[[Any], Any]]]


def params_from_arrays(
    params: Any,
    spec: DecoderSpec,
    name_map: NameMap,
    nnx_names: NnxNames | None,
    dtype: Any,
    shardings: Shardings | None = None,
) -> DecoderParams:
    """The parameters of `spec` from a DecoderParams, from arrays by Hugging Face name, or from a Flax nnx module
    or state with `nnx_names`.

    A DecoderParams is checked and used as it is, without a copy but of what must lie in another format; the other two
    are rearranged and converted to `dtype`.

    Raises:
        ConfigError: `params` is none of these, or a DecoderParams of another dtype or sharding.
        CheckpointError: arrays are missing, unknown or misshapen.
    """
    if isinstance(params, DecoderParams):
        if nnx_names is not None:
            raise ConfigError("name_map= is for nnx parameters; a DecoderParams needs none")
        return _checked(params, spec, dtype, shardings)
    if nnx_names is not None:
        tensors = _from_nnx(params, nnx_names)
    elif isinstance(params, Mapping) and all(hasattr(array, "shape") for array in params.values()):
        tensors = {name: _lazy(array) for name, array in params.items()}
    else:
        raise ConfigError(
            f"params is a {type(params).__name__}; it must be a DecoderParams, a mapping from Hugging Face tensor "
            "names to arrays, or an nnx module or state together with name_map=")
    return load_params(spec, name_map, tensors, dtype, shardings, ignorable)


def _checked(params: DecoderParams, spec: DecoderSpec, dtype: Any, shardings: Shardings | None) -> DecoderParams:
    expected = leaf_paths(abstract_params(spec, dtype))
    given = leaf_paths(params)
    problems = [f"{path} is missing" for path in expected if path not in given]
    problems += [f"{path} is unknown" for path in given if path not in expected]
    problems += [f"{path} is {list(given[path].shape)}, must be {list(leaf.shape)}"
                 for path, leaf in expected.items() if path in given and given[path].shape != leaf.shape]
    if problems:
        raise CheckpointError(f"params do not fit the config: {'; '.join(problems)}")
    where = sharding_of_leaves(expected, shardings)
    placed = []
    for path, leaf in expected.items():
        array, sharding = given[path], sharding_of(where[path])
        if array.dtype != leaf.dtype:
            raise ConfigError(
                f"params: {path} is {array.dtype}, the engine's weights are {leaf.dtype}; cast it, or set dtype=")
        on_device = isinstance(array, jax.Array)
        if on_device and sharding is not None and not array.sharding.is_equivalent_to(sharding, array.ndim):
            raise ConfigError(f"params: {path} is sharded as {array.sharding}, the engine needs {sharding}; "
                              "move it with jax.device_put")
        if not on_device or isinstance(where[path], Format):  # arrays that lie as they must are not copied
            array = jax.device_put(array, where[path])
        placed.append(array)
    return jax.tree.unflatten(jax.tree.structure(params), placed)


def _from_nnx(params: Any, names: NnxNames) -> dict[str, LazyTensor]:
    from flax import nnx

    state = nnx.state(params) if isinstance(params, nnx.Module) else params
    if not isinstance(state, nnx.State):
        raise ConfigError(f"name_map= is for an nnx module or state, but params is a {type(params).__name__}")
    found = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)
             if not isinstance(leaf, nnx.Variable) or isinstance(leaf, nnx.Param)}
    missing = [path for path in names if path not in found]
    unnamed = [path for path in found if path not in names]
    if missing or unnamed:
        raise CheckpointError(
            f"name_map does not fit the nnx parameters; not in the module: {', '.join(missing[:10]) or 'none'}; "
            f"not in name_map: {', '.join(unnamed[:10]) or 'none'}")
    tensors = {}
    for path, target in names.items():
        name, to_hf = (target, None) if isinstance(target, str) else target
        leaf = found[path]
        tensors[name] = _lazy(leaf[...] if isinstance(leaf, nnx.Variable) else leaf, to_hf)
    return tensors


def _lazy(array: Any, to_hf: Callable[[Any], Any] | None = None) -> LazyTensor:
    """`array` may be on a device: it is fetched when it is read, one at a time."""
    if to_hf is None:
        return LazyTensor(tuple(array.shape), np.dtype(array.dtype), lambda: np.asarray(array))
    # One element, repeated without memory, is enough to learn what shape the function makes.
    probe = to_hf(np.broadcast_to(np.zeros((), array.dtype), array.shape))
    return LazyTensor(tuple(probe.shape), np.dtype(probe.dtype), lambda: np.asarray(to_hf(np.asarray(array))))
