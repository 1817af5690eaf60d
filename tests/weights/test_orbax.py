"""Orbax checkpoints: a directory that suffices alone, and clear errors when it does not fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import ignorable, name_map, resolve
from jaxserve.weights.lazy import LazyTensor
from jaxserve.weights.load import load_params
from jaxserve.weights.orbax import restore_params, save_checkpoint
from jaxserve.weights.source import open_model
from kernels_pallas._compat import single_device_sharding
from tests.models.checkpoints import random_checkpoint
from tests.tokenizer.tiny_tokenizers import byte_level
from tests.weights.tiny import FAMILIES, LLAMA


def make_params(config, dtype="float32"):
    spec = resolve(config, None)
    tensors = {name: LazyTensor(t.shape, t.dtype, lambda t=t: t) for name, t in random_checkpoint(config).items()}
    return load_params(spec, name_map(config, spec), tensors, dtype, ignorable=ignorable)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax") / "checkpoint"
    params = make_params(LLAMA)
    save_checkpoint(directory, params, LLAMA, {"temperature": 0.5, "eos_token_id": [2]}, byte_level(bos=True))
    return directory, params


def test_the_directory_alone_restores_model_config_and_tokenizer(checkpoint):
    directory, params = checkpoint
    source = open_model(directory)
    assert source.config == LLAMA
    assert source.generation_config == {"temperature": 0.5, "eos_token_id": [2]}
    assert source.dtype == "float32"
    restored = source.load("float32")
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    tokenizer = source.tokenizer
    assert tokenizer is not None
    original = byte_level(bos=True)
    assert tokenizer.encode("Grüße\n") == original.encode("Grüße\n")
    assert tokenizer.eos_ids == original.eos_ids and tokenizer.special_tokens == original.special_tokens
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == original.render_chat(messages)


def test_restore_converts_and_places(checkpoint):
    directory, params = checkpoint
    sharding = single_device_sharding(jax.devices()[0])
    seen: list[tuple[int, int]] = []
    restored = open_model(directory).load("bfloat16", sharding, lambda done, total: seen.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(restored))
    assert seen == [(total, total)]
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params)):
        assert a.sharding == sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype("bfloat16")))


def test_parameters_of_another_shape_are_all_listed(checkpoint):
    directory, _ = checkpoint
    spec = resolve(LLAMA | {"intermediate_size": 97, "tie_word_embeddings": True}, None)
    with pytest.raises(CheckpointError) as error:
        restore_params(directory, spec, "float32")
    message = str(error.value)
    assert "lm_head is unknown" in message
    assert "layers.w_down is [2, 96, 64], must be [2, 97, 64]" in message
    with pytest.raises(CheckpointError, match=r"layers\.q_norm is missing"):
        restore_params(directory, resolve(FAMILIES["qwen3"] | {"head_dim": 16}, None), "float32")


def edit_manifest(source, target, **changes):
    target.mkdir()
    manifest = json.loads((source / "jaxserve.json").read_text()) | changes
    (target / "jaxserve.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


def test_another_format_version(checkpoint, tmp_path):
    edit_manifest(checkpoint[0], tmp_path / "c", format_version=2)
    with pytest.raises(CheckpointError, match="format version 2; this jaxserve reads version 1"):
        open_model(tmp_path / "c")


def test_incomplete_manifest(checkpoint, tmp_path):
    edit_manifest(checkpoint[0], tmp_path / "c", config=None)
    with pytest.raises(CheckpointError, match="lacks config"):
        open_model(tmp_path / "c")


@pytest.mark.parametrize("content", ["[1]", "null", "", "{", '{"format_version": 1, "dtype": ', "\xff"])
def test_malformed_manifest(tmp_path, content):
    (tmp_path / "jaxserve.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"jaxserve.json (is not|must hold|lacks)"):
        open_model(tmp_path)


@pytest.mark.parametrize("changes", [{"config": [1]}, {"config": "x"}, {"dtype": 5}, {"generation_config": [1]}],
                         ids=str)
def test_a_manifest_with_values_of_the_wrong_kind(checkpoint, tmp_path, changes):
    edit_manifest(checkpoint[0], tmp_path / "c", **changes)
    with pytest.raises(CheckpointError, match=f"malformed: {next(iter(changes))} must be"):
        open_model(tmp_path / "c")


def test_absent_parameters(checkpoint, tmp_path):
    edit_manifest(checkpoint[0], tmp_path / "c")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        open_model(tmp_path / "c").load("float32")
    (tmp_path / "c" / "params").mkdir()
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        open_model(tmp_path / "c").load("float32")


def largest_file(params):
    """Where most of the arrays' bytes are."""
    return max((path for path in params.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


FILES = {"arrays": largest_file, "metadata": lambda params: params / "_METADATA",
         "metadata of arrays": lambda params: params / "array_metadatas" / "process_0"}
DAMAGE = {"cut": lambda file, data: file.write_bytes(data[:len(data) // 2]),
          "garbage": lambda file, data: file.write_bytes(b"\xc5" * len(data)),
          "empty": lambda file, data: file.write_bytes(b""),
          "absent": lambda file, data: file.unlink()}
CASES = [(file, damage) for file in FILES for damage in DAMAGE if (file, damage) != ("metadata of arrays", "absent")]
LOAD_EACH = """
import sys
from pathlib import Path
from jaxserve.errors import CheckpointError
from jaxserve.weights.source import open_model
for directory in map(Path, sys.argv[1:]):
    try:
        open_model(directory).load("float32")
    except CheckpointError as error:
        (directory / "error").write_text(str(error))
"""


@pytest.fixture(scope="module")
def damaged(checkpoint, tmp_path_factory):
    """A damaged copy for each case, after a try to load it; its file `error` says what was told. That in a process of
    its own: when an array cannot be read, Orbax abandons the coroutines that read the others, and Python says so at
    some later time."""
    copies = {case: tmp_path_factory.mktemp("damaged") / "c" for case in CASES}
    for (file, damage), copy in copies.items():
        path = FILES[file](shutil.copytree(checkpoint[0], copy) / "params")
        DAMAGE[damage](path, path.read_bytes())
    done = subprocess.run([sys.executable, "-c", LOAD_EACH, *map(str, copies.values())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copies


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_damaged_files(damaged, case):
    assert re.search("params is damaged or incomplete .*; copy or save the checkpoint again",
                     (damaged[case] / "error").read_text())


def test_nothing_is_overwritten(checkpoint):
    directory, params = checkpoint
    with pytest.raises(CheckpointError, match="is not empty"):
        save_checkpoint(directory, params, LLAMA)


def test_without_tokenizer(tmp_path):
    save_checkpoint(tmp_path / "c", make_params(LLAMA), LLAMA)
    assert open_model(tmp_path / "c").tokenizer is None


def test_no_pickles_are_written(checkpoint):
    assert not [p for p in checkpoint[0].rglob("*") if p.suffix in (".pkl", ".pickle", ".pt", ".bin")]
