"""From what the user calls a model to something that can be loaded."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import CheckpointError
from jaxserve.json_files import read_json_object
from jaxserve.models.hf_config import get_token_ids
from jaxserve.models.params import DecoderParams
from jaxserve.models.placement import NameMap
from jaxserve.models.registry import ignorable, name_map, resolve
from jaxserve.models.spec import DecoderSpec
from jaxserve.tokenizer import TOKENIZER_FILES, Tokenizer
from jaxserve.weights import demo
from jaxserve.weights.gguf import open_gguf
from jaxserve.weights.lazy import TensorMap
from jaxserve.weights.load import Progress, Shardings, check_tensors, load_params
from jaxserve.weights.orbax import MANIFEST, read_manifest, read_tokenizer, restore_params, save_checkpoint
from jaxserve.weights.safetensors import open_safetensors

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", *TOKENIZER_FILES)
# Subdirectories hold other formats of the same weights; so does Mistral's "consolidated".
_HUB_IGNORED = ["*/*", "consolidated*"]
_PATH_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
_KINDS = "a local Hugging Face directory, a .gguf file, an Orbax checkpoint directory, a hub id, or \"demo\""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model whose files are at hand and whose config has been read, but whose weights have not.

    Attributes:
        description: one line for the user.
        config: as in config.json.
        generation_config: as in generation_config.json; empty when there is none.
        dtype: of the weights as stored ("float32", "bfloat16", ...), None if not known or quantised; what the
            engine's `dtype="auto"` starts from.
        tensors: the checkpoint's tensors; None for an Orbax checkpoint, which is restored as a whole, and for
            weights in memory.
    """

    description: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    spec: DecoderSpec
    name_map: NameMap
    dtype: str | None
    tensors: TensorMap | None
    read_tokenizer: Callable[[], Tokenizer | None]
    restore: Callable[[Any, Shardings | None], DecoderParams] | None = None

    def __post_init__(self) -> None:
        # The engine reads them when it starts; who only looks at the model or converts it hears of it too.
        get_token_ids(self.config, "eos_token_id")
        get_token_ids(self.generation_config, "eos_token_id", "generation_config")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Read at first use; None if the model comes without one.

        Raises:
            CheckpointError: there is one, but it cannot be read.
        """
        return self.read_tokenizer()

    @property
    def valid_vocab(self) -> int:
        """Ids below it may be sampled; the embedding may have more rows than the tokenizer ids."""
        return self.spec.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

    def check(self) -> None:
        """Raises what `load` would if tensors are missing, unknown, misshapen or quantised; reads none of them."""
        if self.tensors is not None:
            check_tensors(self.spec, self.name_map, self.tensors, ignorable)

    def load(
        self, dtype: Any, shardings: Shardings | None = None, progress: Progress | None = None
    ) -> DecoderParams:
        """The parameters in `dtype` on the devices; see `load_params`. An Orbax checkpoint reports progress once,
        at its end."""
        if self.tensors is not None:
            return load_params(self.spec, self.name_map, self.tensors, dtype, shardings, ignorable, progress)
        assert self.restore is not None, "weights in memory are not loaded"
        params = self.restore(dtype, shardings)
        if progress is not None:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            progress(num_bytes, num_bytes)
        return params

    def save(self, params: DecoderParams, directory: str | os.PathLike[str]) -> None:
        """Writes these parameters with this model's config and tokenizer; see `save_checkpoint`."""
        save_checkpoint(Path(directory), params, self.config, self.generation_config, self.tokenizer)


def open_model(model: str | os.PathLike[str], max_model_len: int | None = None) -> ModelSource:
    """Finds a model and reads its config.

    Args:
        model: a local Hugging Face directory, a .gguf file, an Orbax checkpoint written by
            `save_checkpoint`, a hub id ("owner/name", downloaded into the hub's cache), or "demo".
            What exists as a path is a path.
        max_model_len: some rope scalings depend on it; see `registry.resolve`.

    Raises:
        CheckpointError: there is no such model, or its files are incomplete.
        UnsupportedModelError: it asks for something that is not implemented.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if not name:
        raise CheckpointError(f"the model's name is empty; give {_KINDS}")
    if name == "demo":
        source = _from_gguf(demo.demo_model_path(), max_model_len, f"demo ({demo.NAME})")
        return dataclasses.replace(source, generation_config={**source.generation_config, **demo.SAMPLING_DEFAULTS})
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return _from_orbax(path, max_model_len)
        return _from_directory(path, max_model_len, f"Hugging Face directory {path}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file, but not a .gguf; give {_KINDS}")
        return _from_gguf(path, max_model_len, f"GGUF file {path}")
    if not isinstance(model, str) or _looks_like_path(name):
        raise CheckpointError(f"{name} does not exist; give {_KINDS}")
    return _from_directory(_download(name), max_model_len, f"hub model {name}")


def read_config(model: str | os.PathLike[str]) -> tuple[str, dict[str, Any], str | None]:
    """Description, config.json and dtype of a model, without its weights: of a hub model only the config is fetched.

    Args:
        model: a config.json, the directory of one, or anything that `open_model` takes.

    Raises:
        CheckpointError: there is no such model, or it has no config.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        description = f"configuration {path}"
    elif path.is_dir() and (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        description, path = f"Hugging Face directory {path}", path / "config.json"
    elif isinstance(model, str) and model != "demo" and not path.exists() and not _looks_like_path(model):
        description, path = f"hub model {model}", _download(model, ["config.json"]) / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{model} has no config.json; give {_KINDS}")
    else:
        source = open_model(model)
        return source.description, source.config, source.dtype
    config = read_json_object(path)
    return description, config, _stored_dtype(config)


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return None if dtype is None else str(dtype)


def memory_model(
    config: Mapping[str, Any], max_model_len: int | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
) -> ModelSource:
    """A model whose weights are in memory already (see `params_from_arrays`).

    Args:
        config: as in config.json.
        tokenizer: one, or the directory of one.
    """
    spec = resolve(config, max_model_len)
    return ModelSource(
        description=f"{spec.name} in memory", config=dict(config), generation_config={}, spec=spec,
        name_map=name_map(config, spec), tensors=None, dtype=_stored_dtype(config),
        read_tokenizer=lambda: tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer)
        else Tokenizer.from_directory(Path(tokenizer)))


def _tokenizer_of(path: Path) -> Tokenizer | None:
    has_one = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return Tokenizer.from_directory(path) if has_one else None


def _looks_like_path(name: str) -> bool:
    return not _HUB_ID.match(name) or name.endswith(_PATH_SUFFIXES)


def _from_directory(path: Path, max_model_len: int | None, description: str) -> ModelSource:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has neither config.json nor {MANIFEST}, so it holds no model; give {_KINDS}")
    config = read_json_object(config_path)
    generation_path = path / "generation_config.json"
    spec = resolve(config, max_model_len)
    tensors = open_safetensors(path)
    names = name_map(config, spec)
    stored = next((str(tensors[name].dtype) for name in names if name in tensors), "float32")
    return ModelSource(
        description=description, config=config, spec=spec, name_map=names, tensors=tensors, dtype=stored,
        generation_config=read_json_object(generation_path) if generation_path.is_file() else {},
        read_tokenizer=lambda: _tokenizer_of(path))


def _from_gguf(path: Path, max_model_len: int | None, description: str) -> ModelSource:
    model = open_gguf(path)
    spec = resolve(model.config, max_model_len)
    return ModelSource(
        description=description, config=model.config, generation_config=model.generation_config, spec=spec,
        name_map=name_map(model.config, spec), tensors=model.tensors, dtype=model.dtype,
        read_tokenizer=lambda: Tokenizer.from_gguf(model.metadata))


def _from_orbax(path: Path, max_model_len: int | None) -> ModelSource:
    manifest = read_manifest(path)
    config = manifest["config"]
    spec = resolve(config, max_model_len)
    return ModelSource(
        description=f"Orbax checkpoint {path}", config=config, generation_config=manifest["generation_config"],
        spec=spec, name_map=name_map(config, spec), tensors=None, dtype=manifest["dtype"],
        read_tokenizer=lambda: read_tokenizer(path),
        restore=lambda dtype, shardings: restore_params(path, spec, dtype, shardings))


def _download(repo_id: str, files: Sequence[str] = _HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(files), ignore_patterns=_HUB_IGNORED))
    except GatedRepoError as e:
        raise CheckpointError(
            f"{repo_id} is gated: accept its terms on the hub and log in (hf auth login), then try again") from e
    except RepositoryNotFoundError as e:
        raise CheckpointError(
            f"the hub has no model {repo_id} (or it is private and you are not logged in), and there is no such "
            f"directory here; give {_KINDS}") from e
    except HFValidationError as e:
        raise CheckpointError(f"{repo_id} is not a possible hub id ({e}); give {_KINDS}") from e
    except OSError as e:  # every other error of the hub's client, and those of the network
        raise CheckpointError(
            f"{repo_id} is neither a local directory nor in the hub's cache, and the hub cannot be reached ({e}); "
            f"check the network, or give {_KINDS}") from e
