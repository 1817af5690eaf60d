"""safetensors directories: what is read, and that every defect is an error instead of random weights."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.weights.safetensors import open_safetensors, read_header

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(8).astype(ml_dtypes.bfloat16).reshape(2, 2, 2),
    "empty": np.zeros((0, 3), np.float32),
}


def write_shards(directory, parts, weight_map=None):
    for file, tensors in parts.items():
        save_file(tensors, directory / file)
    if weight_map is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert tensors[name].shape == array.shape and tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name].read(), array)


def test_single_file_without_index(tmp_path):
    write_shards(tmp_path, {"model.safetensors": TENSORS})
    assert_equal(open_safetensors(tmp_path), TENSORS)


def test_shards_equal_the_single_file(tmp_path):
    parts = {"x-1.safetensors": {"a": TENSORS["a"]}, "x-2.safetensors": {k: TENSORS[k] for k in ("b", "c", "empty")}}
    write_shards(tmp_path, parts, {name: file for file, part in parts.items() for name in part})
    assert_equal(open_safetensors(tmp_path), TENSORS)


def test_index_that_names_an_absent_shard(tmp_path):
    write_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}},
                 {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(CheckpointError, match="lacks 1 of 2 shards: x-2.safetensors"):
        open_safetensors(tmp_path)


def test_index_that_names_an_absent_tensor(tmp_path):
    write_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}}, {"a": "x-1.safetensors", "b": "x-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"shards lack: b \(in x-1"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write_shards(tmp_path, {"x-1.safetensors": {"a": TENSORS["a"]}, "x-2.safetensors": TENSORS},
                 {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(CheckpointError, match="tensor a is in two shards, x-1.safetensors and x-2.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_malformed_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        open_safetensors(tmp_path)


def test_index_cannot_leave_the_directory(tmp_path):
    write_shards(tmp_path, {}, {"a": "../x.safetensors"})
    with pytest.raises(CheckpointError, match="outside its own directory"):
        open_safetensors(tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*can run code"):
        open_safetensors(tmp_path)


def test_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


def test_a_huge_header_length_is_refused_before_it_is_allocated(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="claims 4611686018427387904 bytes"):
        read_header(path)


def test_a_header_of_nothing_but_brackets(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(CheckpointError, match="not a whole safetensors file: its header is not JSON"):
        read_header(path)


def write_header(path, header, data=b""):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("entry", [
    3, {}, {"dtype": "F32", "shape": [2], "data_offsets": [0]}, {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}, {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
])
def test_malformed_entries(tmp_path, entry):
    path = write_header(tmp_path / "x.safetensors", {"a": entry}, b"\0" * 8)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


def test_unknown_dtype_is_named(tmp_path):
    path = write_header(tmp_path / "x.safetensors", {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0")
    with pytest.raises(UnsupportedModelError, match="tensor a has the dtype F4"):
        read_header(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(cut=st.integers(0, 400), flip=st.integers(0, 399), byte=st.integers(0, 255))
def test_damage_gives_a_checkpoint_error_or_the_same_layout(tmp_path, cut, flip, byte):
    """Whatever happens to the bytes, nothing but a CheckpointError comes out, and no read leaves the file."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    data = bytearray(path.read_bytes()[:cut] if cut < 200 else path.read_bytes())
    if flip < len(data):
        data[flip] = byte
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape
