"""The container of a GGUF file: its metadata and where its tensors lie.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The header is read
here rather than by `gguf.GGUFReader` because that one makes an array object of every vocabulary entry (1.6 s
for 49k tokens; this takes 0.1 s) and trusts the lengths it reads; block sizes and dequantisation are
the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jaxserve.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d", GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is in numpy's order (GGUF writes the fastest axis first)."""

    path: Path
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # in the file
    num_bytes: int

    def read_bytes(self) -> np.ndarray:
        """The stored bytes, u8[num_bytes]: a view of a mapping that lasts as long as the array."""
        if self.num_bytes == 0:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, mode="r", offset=self.offset, shape=(self.num_bytes,)).view(np.ndarray)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata values are Python scalars, strings, lists of strings, or numpy arrays of numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_file(path: Path) -> GGUFFile:
    """Reads the header; of a model split over several files (`*-00001-of-00003.gguf`), all headers.

    Raises:
        CheckpointError: not a GGUF file, truncated, or a part of a split model is absent.
        UnsupportedModelError: another version or byte order.
    """
    first = _read_one(path)
    count = int(first.metadata.get("split.count", 1))
    if count <= 1:
        return first
    name = _SPLIT_NAME.match(path.name)
    if name is None:
        raise CheckpointError(
            f"{path} is one of {count} parts, so its name must end in -00001-of-{count:05d}.gguf and the other parts "
            "must lie beside it")
    parts = [path.with_name(f"{name['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    absent = [p.name for p in parts if not p.is_file()]
    if absent:
        raise CheckpointError(f"{path} is split into {count} parts; absent: {', '.join(absent)}")
    files = [_read_one(p) for p in parts]
    tensors: dict[str, GGUFTensor] = {}
    for file in files:
        doubled = tensors.keys() & file.tensors.keys()
        if doubled:
            raise CheckpointError(f"tensor {min(doubled)} is in two parts of the split model {path}")
        tensors |= file.tensors
    return GGUFFile(path, files[0].metadata, tensors)  # only the first part carries the model's metadata


def _read_one(path: Path) -> GGUFFile:
    with path.open("rb") as f:
        if path.stat().st_size < 24 or f.read(4) != _MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _parse(path, _Cursor(path, mapped))


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    cursor.position = len(_MAGIC)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        what = "is big endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise UnsupportedModelError(f"{path} {what}; supported: little endian, versions 2 and 3")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment must be a power of two, got {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, dims, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path} holds tensor {name} twice")
        tensors[name] = _locate(path, name, tuple(reversed(dims)), type_id, data_start + offset, cursor.size)
    return GGUFFile(path, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name} has {num_dims} dimensions")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]
    return name, dims, cursor.scalar("I"), cursor.scalar("Q")


def _locate(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int, file_size: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModelError(f"{path}: tensor {name} has the unknown quantisation type {type_id}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        raise CheckpointError(f"{path}: tensor {name} has rows of {row}, {kind.name} needs a multiple of {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset + num_bytes > file_size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name} ends at byte {offset + num_bytes}, the file has {file_size}; "
            "download it again")
    return GGUFTensor(path, shape, kind, offset, num_bytes)


class _Cursor:
    """Reads values one after another; a length that leaves the file is an error before anything is allocated."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.size, self.position = path, data, len(data), 0

    def corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a whole GGUF file: {what}; download it again")

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self.size:
            raise self.corrupt(f"its header needs {num_bytes} bytes at {self.position}, the file has {self.size}")
        taken = self.data[self.position:end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"the text before byte {self.position} is not UTF-8") from None

    def value(self, type_id: int) -> Any:
        if type_id == GGUFValueType.STRING:
            return self.string()
        if type_id == GGUFValueType.ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return self.strings(count) if item == GGUFValueType.STRING else self.numbers(item, count)
        return self.scalar(self.code(type_id))

    def numbers(self, type_id: int, count: int) -> np.ndarray:
        dtype = np.dtype("<" + self.code(type_id))
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def strings(self, count: int) -> list[str]:
        """`self.string()` count times, without its calls: a vocabulary has a hundred thousand of these."""
        data, position, size = self.data, self.position, self.size
        read_length = struct.Struct("<Q").unpack_from
        if count * 8 > size - position:
            raise self.corrupt(f"a list of {count} texts does not fit into it")
        texts = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise self.corrupt("a list of texts leaves it")
            position = start + read_length(data, position)[0]
            if position > size:
                raise self.corrupt("a list of texts leaves it")
            # Some vocabularies hold tokens that are not UTF-8; they cannot be made from text, only decoded.
            texts.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return texts

    def code(self, type_id: int) -> str:
        code = _SCALARS.get(type_id)  # type: ignore[call-overload]
        if code is None:
            raise self.corrupt(f"metadata of the unknown type {type_id}")
        return code
