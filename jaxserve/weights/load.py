"""Checkpoint tensors into the parameter pytree, straight into (sharded) device arrays.

One leaf at a time, and of it one shard at a time: a host buffer of the shard's shape is filled from the
checkpoint's tensors (each read, placed and dropped), handed to the device, and released before the next.
Nothing is initialised first; on CPU the buffer itself becomes the jax array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental.layout import Format

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.placement import NameMap, Placement
from jaxserve.models.spec import DecoderSpec
from jaxserve.weights.lazy import TensorMap

Progress = Callable[[int, int], None]  # bytes of device memory filled so far, and in total
# Of each leaf, or of all: where it is, and with a Format how it lies there.
Shardings = DecoderParams | jax.sharding.Sharding | Format

_FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
_THREADS = 4  # numpy copies and dequantises without the GIL; each thread holds one tensor
_BUFFER_ALIGNMENT = 64  # XLA:CPU adopts a numpy buffer without a copy only at this alignment


def load_params(
    spec: DecoderSpec,
    name_map: NameMap,
    tensors: TensorMap,
    dtype: Any,
    shardings: Shardings | None = None,
    ignorable: Callable[[str, DecoderSpec], bool] = lambda name, spec: False,
    progress: Progress | None = None,
) -> DecoderParams:
    """The parameters of `spec` in `dtype`, filled from `tensors` as `name_map` says.

    Args:
        shardings: one (or a Format) for every leaf, or a DecoderParams of them; None: jax's default device.
        ignorable: whether a tensor that the name map does not know may be left out (buffers that some
            exporters write, a tied `lm_head`); any other unknown tensor is an error.
        progress: called after each tensor with (bytes filled, bytes in total).

    Raises:
        CheckpointError: tensors are missing, unknown or misshapen; the message lists all three kinds.
        UnsupportedModelError: a needed tensor is not of a plain float type (a quantised checkpoint).
    """
    check_tensors(spec, name_map, tensors, ignorable)
    leaves = leaf_paths(abstract_params(spec, dtype))
    sources = _sources_by_leaf(name_map)
    for path, leaf in leaves.items():
        placed = sum(_volume(p.index, leaf.shape) for _, p in sources.get(path, ()))
        assert placed == math.prod(leaf.shape), f"the name map fills {placed} elements of {path} {leaf.shape}"
    by_path = sharding_of_leaves(leaves, shardings)
    report = _Reporter(progress, sum(_shard_bytes(leaf, by_path[path]) for path, leaf in leaves.items()))
    arrays = [_build_leaf(leaf, sources[path], tensors, by_path[path], report) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_params(spec, dtype)), arrays)


def check_tensors(
    spec: DecoderSpec, name_map: NameMap, tensors: TensorMap, ignorable: Callable[[str, DecoderSpec], bool]
) -> None:
    """Raises one CheckpointError that lists every missing, unknown and misshapen tensor (ten of each kind)."""
    missing = [name for name in name_map if name not in tensors]
    unknown = [name for name in tensors if name not in name_map and not ignorable(name, spec)]
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, must be {list(places[0].shape)}"
        for name, places in name_map.items() if name in tensors and tensors[name].shape != places[0].shape
    ]
    problems = [
        f"{len(found)} {kind}: {', '.join(found[:10])}{' ...' if len(found) > 10 else ''}"
        for kind, found in (("missing", missing), ("unknown", unknown), ("of the wrong shape", misshapen)) if found
    ]
    if problems:
        raise CheckpointError(f"the checkpoint's tensors do not fit {spec.name}: " + "; ".join(problems))
    for name in name_map:
        if tensors[name].dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"tensor {name} is {tensors[name].dtype}; weights must be {', '.join(map(str, _FLOATS))}, or quantised "
                "in a GGUF file")


def leaf_paths(params: DecoderParams) -> dict[str, Any]:
    """Dotted path -> leaf, in pytree order. Absent (None) leaves are left out."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }


def sharding_of_leaves(leaves: Mapping[str, Any], shardings: Shardings | None) -> dict[str, Any]:
    """Leaf path -> its sharding or format, None for the default device."""
    if isinstance(shardings, DecoderParams):
        return leaf_paths(shardings)
    return dict.fromkeys(leaves, shardings)


def sharding_of(where: Any) -> Any:
    """The sharding of a sharding or format."""
    return where.sharding if isinstance(where, Format) else where


@dataclass(slots=True)
class _Reporter:
    progress: Progress | None
    total: int
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


_Sources = list[tuple[str, Placement]]
_Range = tuple[int, int]


def _sources_by_leaf(name_map: NameMap) -> dict[str, _Sources]:
    sources: dict[str, _Sources] = {}
    for name, places in name_map.items():
        for place in places:
            sources.setdefault(place.leaf, []).append((name, place))
    return sources


def _build_leaf(
    leaf: jax.ShapeDtypeStruct, sources: _Sources, tensors: TensorMap, where: Any, report: _Reporter
) -> jax.Array:
    whole = tuple((0, n) for n in leaf.shape)
    sharding = sharding_of(where)
    if sharding is None:
        return jax.device_put(_fill_shard(whole, leaf.dtype, sources, tensors, report))
    pieces = []
    for window, devices in _windows(sharding, leaf.shape).items():
        buffer = _fill_shard(window, leaf.dtype, sources, tensors, report)
        copies = [jax.device_put(buffer, device) for device in devices]
        # An asynchronous transfer keeps its host buffer alive; waiting bounds the host at one shard.
        jax.block_until_ready(copies)
        pieces += copies
    array = jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)
    return jax.device_put(array, where, donate=True) if isinstance(where, Format) else array


def _windows(sharding: Any, shape: tuple[int, ...]) -> dict[tuple[_Range, ...], list[Any]]:
    """Part of the leaf -> the local devices that hold it. Replicas share one host buffer."""
    windows: dict[tuple[_Range, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        window = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        windows.setdefault(window, []).append(device)
    return windows


def _fill_shard(
    window: tuple[_Range, ...], dtype: np.dtype, sources: _Sources, tensors: TensorMap, report: _Reporter
) -> np.ndarray:
    out = _aligned_empty(tuple(stop - start for start, stop in window), np.dtype(dtype))

    def fill(source: tuple[str, Placement]) -> int:
        name, place = source
        overlap = _overlap(place.index, window)
        if overlap is None:
            return 0
        into, part = overlap
        try:
            with np.errstate(over="raise"):
                out[into] = place.to_leaf(tensors[name].read())[part]
        except FloatingPointError:
            raise CheckpointError(f"tensor {name} has values that {out.dtype} cannot hold; "
                                  "use dtype=\"bfloat16\" or \"float32\"") from None
        return out[into].nbytes

    with ThreadPoolExecutor(_THREADS) as pool:
        for num_bytes in pool.map(fill, sources):
            report.add(num_bytes)
    return out


def _overlap(
    index: tuple[int | slice, ...], window: tuple[_Range, ...]
) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
    """Where a placement's region meets a window of the leaf: (index into the window's buffer, index into
    the region's own view, which lacks the axes that the placement fixes), or None when they are disjoint."""
    into: list[int | slice] = []
    part: list[slice] = []
    for at, (start, stop) in zip(_full_index(index, len(window)), window, strict=True):
        if isinstance(at, int):
            if not start <= at < stop:
                return None
            into.append(at - start)
            continue
        assert at.step in (None, 1), at
        first = at.start or 0
        low, high = max(first, start), stop if at.stop is None else min(at.stop, stop)
        if low >= high:
            return None
        into.append(slice(low - start, high - start))
        part.append(slice(low - first, high - first))
    return tuple(into), tuple(part)


def _full_index(index: tuple[int | slice, ...], ndim: int) -> Iterator[int | slice]:
    yield from index
    yield from (slice(None) for _ in range(ndim - len(index)))


def _volume(index: tuple[int | slice, ...], shape: tuple[int, ...]) -> int:
    return math.prod(
        1 if isinstance(at, int) else len(range(*at.indices(n)))
        for at, n in zip(_full_index(index, len(shape)), shape, strict=True))


def _shard_bytes(leaf: jax.ShapeDtypeStruct, sharding: Any) -> int:
    size = math.prod(leaf.shape)
    if sharding is not None:
        windows = _windows(sharding_of(sharding), leaf.shape)
        size = sum(math.prod(stop - start for start, stop in window) for window in windows)
    return size * leaf.dtype.itemsize


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _BUFFER_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _BUFFER_ALIGNMENT
    return raw[start:start + size].view(dtype).reshape(shape)
