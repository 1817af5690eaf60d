"""What the user may call a model."""

from __future__ import annotations

import json

import huggingface_hub
import huggingface_hub.errors
import jax
import numpy as np
import pytest

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.weights import demo
from jaxserve.weights.source import memory_model, open_model
from tests.models.checkpoints import random_checkpoint
from tests.tokenizer.tiny_tokenizers import SPECIAL, byte_level, byte_level_backend
from tests.weights.tiny import FAMILIES, LLAMA, write_gguf, write_hf


def values(params):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def assert_same(left, right):
    for a, b in zip(values(left), values(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def hf(tmp_path):
    directory = write_hf(tmp_path / "hf", LLAMA, random_checkpoint(LLAMA))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    byte_level_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return directory


def test_hugging_face_directory(hf):
    source = open_model(hf)
    assert source.config == LLAMA and source.generation_config == {"temperature": 0.6}
    assert source.spec.name == "llama" and source.dtype == "float32"
    assert source.tokenizer is source.tokenizer and source.tokenizer.encode("hi") == byte_level().encode("hi")
    assert str(hf) in source.description
    assert source.load("float32").embed.shape == (70, 64)


def test_shards_gguf_and_orbax_load_to_the_same_parameters(hf, tmp_path):
    tensors = random_checkpoint(LLAMA)
    expected = open_model(str(hf)).load("float32")
    assert_same(open_model(write_hf(tmp_path / "sharded", LLAMA, tensors, shards=3)).load("float32"), expected)
    assert_same(open_model(write_gguf(tmp_path / "m.gguf", LLAMA, tensors)).load("float32"), expected)
    open_model(hf).save(expected, tmp_path / "orbax")
    assert_same(open_model(tmp_path / "orbax").load("float32"), expected)


def test_defects_are_reported_when_loading(tmp_path):
    tensors = random_checkpoint(LLAMA)
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="1 missing: model.norm.weight"):
        open_model(write_hf(tmp_path / "m", LLAMA, tensors)).load("float32")


def test_demo(monkeypatch, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA))
    monkeypatch.setattr(demo, "demo_model_path", lambda: path)
    source = open_model("demo")
    assert source.description == f"demo ({demo.NAME})"
    assert source.generation_config.items() >= demo.SAMPLING_DEFAULTS.items()


def test_max_model_len_reaches_the_spec(tmp_path):
    config = FAMILIES["llama"] | {"rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32}}
    directory = write_hf(tmp_path / "m", config, random_checkpoint(config))
    assert open_model(directory, 32).spec.rope.inv_freq != open_model(directory, 64).spec.rope.inv_freq


@pytest.mark.parametrize("name", ["./missing", "/no/such/model", "~/nothing/here", "missing.gguf", "owner/m.gguf",
                                  "gpt9", "a/b/c", "owner/na me"])
def test_paths_that_do_not_exist(name):
    with pytest.raises(CheckpointError, match="does not exist; give a local Hugging Face directory"):
        open_model(name)


def test_an_empty_name():
    with pytest.raises(CheckpointError, match="name is empty"):
        open_model("")


def test_path_objects_are_never_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    with pytest.raises(CheckpointError, match="does not exist"):
        open_model(Path("owner/name"))


def test_other_files_and_empty_directories(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a .gguf"):
        open_model(tmp_path / "model.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither config.json nor jaxserve.json"):
        open_model(tmp_path / "empty")


def test_malformed_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        open_model(tmp_path)


@pytest.mark.parametrize("content, message", [
    (b"[" * 100_000, "is not JSON of a sane depth"), (b"\xff{}", "is not UTF-8 text"),
    (b"[1]", "must hold a JSON object"),
    (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_none(hf, file, content, message):
    (hf / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file} {message}"):
        open_model(hf)


@pytest.mark.parametrize("value", ["x", ["a"], [None], 1.5, True, {"a": 1}], ids=str)
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_eos_ids_that_are_none(hf, file, value):
    content = json.loads((hf / f"{file}.json").read_text()) | {"eos_token_id": value}
    (hf / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^{file}: eos_token_id must be a token id or a list of token ids, got"):
        open_model(hf)


def test_unknown_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM is not supported"):
        open_model(tmp_path)


def test_directory_without_tokenizer(tmp_path):
    assert open_model(write_hf(tmp_path / "m", LLAMA, random_checkpoint(LLAMA))).tokenizer is None


def test_hub_download_takes_safetensors_and_tokenizer_files_only(hf, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        return str(hf)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_model("owner/name").description == "hub model owner/name"
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json",
             "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    others = ["pytorch_model.bin", "modeling_x.py", "onnx/model.safetensors", "consolidated.safetensors", "x.gguf"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *others], allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    assert list(kept) == files
    assert asked["repo_id"] == "owner/name"


def hub_error(kind):
    return kind.__new__(kind)  # the constructor wants a whole HTTP response


@pytest.mark.parametrize(("raised", "message"), [
    (huggingface_hub.errors.LocalEntryNotFoundError("no route"), "hub cannot be reached"),
    (huggingface_hub.errors.OfflineModeIsEnabled("offline"), "hub cannot be reached"),
    (ConnectionError("refused"), "hub cannot be reached"),
    (hub_error(huggingface_hub.errors.GatedRepoError), "is gated: accept its terms"),
    (hub_error(huggingface_hub.errors.RepositoryNotFoundError), "the hub has no model owner/name"),
    (huggingface_hub.errors.HFValidationError("--"), "not a possible hub id"),
], ids=lambda x: type(x).__name__)
def test_hub_failures_are_explained(raised, message, monkeypatch):
    def snapshot_download(repo_id, **kwargs):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=message) as error:
        open_model("owner/name")
    assert error.value.__cause__ is raised


def test_memory_model(tmp_path):
    tokenizer = byte_level()
    source = memory_model(LLAMA | {"dtype": "bfloat16"}, None, tokenizer)
    assert source.tokenizer is tokenizer and source.dtype == "bfloat16"
    assert memory_model(LLAMA).tokenizer is None
    tokenizer.save(tmp_path)
    assert memory_model(LLAMA, tokenizer=tmp_path).tokenizer.encode("a") == tokenizer.encode("a")


@pytest.mark.slow
def test_the_real_demo_model():
    source = open_model("demo")
    params = source.load("float32")
    assert source.spec.num_layers == 30 and sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    tokenizer = source.tokenizer
    assert tokenizer.encode("x  1  22") == [104, 256, 33, 256, 34, 34]  # as llama.cpp has it
    assert tokenizer.eos_ids == {2} and "default" in tokenizer.chat_templates
