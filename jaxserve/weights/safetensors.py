"""A Hugging Face directory's safetensors files as a lazy mapping of names to tensors.

Format (github.com/huggingface/safetensors): 8 bytes of header length (little endian), a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data. Each read maps just the
tensor's own bytes: nothing stays mapped afterwards, so resident memory does not grow to the file's size.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.json_files import read_json_object
from jaxserve.weights.lazy import LazyTensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def open_safetensors(directory: Path) -> dict[str, LazyTensor]:
    """Tensors of a directory: one file, or shards with an index. Only headers are read.

    Raises:
        CheckpointError: no safetensors files (a directory with only pickles is refused: unpickling runs
            code), an index that names absent shards or tensors, a tensor in two shards, a corrupt file.
    """
    index_path = directory / INDEX_NAME
    if index_path.is_file():
        weight_map = _read_index(index_path)
        tensors = _merge(directory, sorted(set(weight_map.values())))
        absent = [f"{name} (in {shard})" for name, shard in weight_map.items() if name not in tensors]
        if absent:
            raise CheckpointError(f"{index_path} names tensors that its shards lack: {_first(absent)}")
        return tensors
    names = sorted(p.name for p in directory.glob("*.safetensors"))
    if SINGLE_NAME in names:
        names = [SINGLE_NAME]
    if names:
        return _merge(directory, names)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{directory} has its weights only as pickle files ({_first(pickles)}), which can run code when they are "
            "read and are therefore refused; convert them to safetensors first")
    raise CheckpointError(f"{directory} has no .safetensors file")


def read_header(path: Path) -> dict[str, LazyTensor]:
    """Tensors of one file. Every length is checked against the file's size before it is used."""

    def corrupt(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a whole safetensors file: {what}; download it again")

    size = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(8)
        if len(prefix) < 8:
            raise corrupt(f"it has {size} bytes")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise corrupt(f"its header claims {header_bytes} bytes, the file has {size}")
        try:
            header = json.loads(f.read(header_bytes))
        except ValueError as e:
            raise corrupt(f"its header is not JSON ({e})") from None
        except RecursionError:
            raise corrupt("its header is not JSON of a sane depth") from None
    if not isinstance(header, dict):
        raise corrupt("its header is not a JSON object")
    data_start = 8 + header_bytes
    tensors, end_of_data = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tag, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise corrupt(f"the entry of tensor {name!r} is malformed") from None
        if not isinstance(tag, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise corrupt(f"the entry of tensor {name!r} is malformed")
        if tag not in _DTYPES:
            raise UnsupportedModelError(f"{path}: tensor {name} has the dtype {tag}; known: {', '.join(_DTYPES)}")
        dtype = _DTYPES[tag]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise corrupt(f"tensor {name} of shape {list(shape)} and dtype {tag} has {end - begin} bytes")
        end_of_data = max(end_of_data, end)
        tensors[name] = _mapped(path, dtype, shape, data_start + begin)
    if data_start + end_of_data != size:
        raise corrupt(f"its header describes {data_start + end_of_data} bytes, the file has {size}")
    return tensors


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> LazyTensor:
    def read() -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)

    return LazyTensor(shape, dtype, read)


def _merge(directory: Path, shards: list[str]) -> dict[str, LazyTensor]:
    absent = [name for name in shards if not (directory / name).is_file()]
    if absent:
        raise CheckpointError(f"{directory} lacks {len(absent)} of {len(shards)} shards: {_first(absent)}")
    tensors: dict[str, LazyTensor] = {}
    origin: dict[str, str] = {}
    for shard in shards:
        for name, tensor in read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"{directory}: tensor {name} is in two shards, {origin[name]} and {shard}")
            tensors[name], origin[name] = tensor, shard
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} is not a safetensors index: it needs an object \"weight_map\"")
    if not all(isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()):
        raise CheckpointError(f"{path} names shards outside its own directory")
    return weight_map


def _first(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
