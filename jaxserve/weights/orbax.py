"""Orbax checkpoints that stand on their own: parameters, config and tokenizer in one directory.

    jaxserve.json    format version, Hugging Face config, generation config, dtype
    params/          the Orbax checkpoint: a flat dict, dotted leaf path -> array
    tokenizer/       tokenizer.json and tokenizer_config.json, if there is a tokenizer

The dict is keyed by leaf path and not by our classes, so a checkpoint outlives changes to them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format

from jaxserve.errors import CheckpointError
from jaxserve.json_files import read_json_object
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.spec import DecoderSpec
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.load import Shardings, leaf_paths, sharding_of, sharding_of_leaves
from kernels_pallas._compat import single_device_sharding

MANIFEST = "jaxserve.json"
FORMAT_VERSION = 1
_PARAMS, _TOKENIZER = "params", "tokenizer"


def save_checkpoint(
    directory: Path,
    params: DecoderParams,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a checkpoint that `open_model` reads. The manifest comes last, so a directory that has one is whole.

    Raises:
        CheckpointError: the directory exists and is not empty.
    """
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; save the checkpoint to a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty; save the checkpoint to a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"cannot write a checkpoint to {directory}: {e.strerror}") from e
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / _PARAMS, leaf_paths(params))
    if tokenizer is not None:
        (directory / _TOKENIZER).mkdir()
        tokenizer.save(directory / _TOKENIZER)
    manifest = {"format_version": FORMAT_VERSION, "dtype": str(params.embed.dtype), "config": dict(config),
                "generation_config": dict(generation_config or {})}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of jaxserve.json: format_version, dtype, config, generation_config.

    Raises:
        CheckpointError: it is malformed, or of another format version.
    """
    path = directory / MANIFEST
    manifest = read_json_object(path)
    if "format_version" not in manifest:
        raise CheckpointError(f"{path} lacks format_version")
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version!r:.80}; this jaxserve reads version "
                              f"{FORMAT_VERSION}")
    kinds = {"dtype": str, "config": dict, "generation_config": dict}
    absent = [key for key in kinds if key not in manifest]
    if absent:
        raise CheckpointError(f"{path} lacks {', '.join(absent)}")
    for key, kind in kinds.items():
        if not isinstance(manifest[key], kind):
            what = "a text" if kind is str else "a JSON object"
            raise CheckpointError(f"{path} is malformed: {key} must be {what}, got {manifest[key]!r:.80}")
    return manifest


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer that was saved with the checkpoint, if one was."""
    return Tokenizer.from_directory(directory / _TOKENIZER) if (directory / _TOKENIZER).is_dir() else None


def restore_params(
    directory: Path, spec: DecoderSpec, dtype: Any, shardings: Shardings | None = None
) -> DecoderParams:
    """The parameters in `dtype`, each leaf read straight into its sharding (None: jax's default device).

    Raises:
        CheckpointError: leaves are missing, unknown or of the wrong shape, and all are listed; or files are damaged.
    """
    import orbax.checkpoint as ocp

    path = directory.absolute() / _PARAMS
    if not path.is_dir():
        raise CheckpointError(f"{directory} has no {_PARAMS}/, so it is not a whole checkpoint; save it again")
    expected = abstract_params(spec, dtype)
    wanted = leaf_paths(expected)
    with _damage_found(path), ocp.StandardCheckpointer() as checkpointer:
        _check_leaves(directory, {name: tuple(m.shape) for name, m in _stored(checkpointer, path).items()}, wanted)
        where = sharding_of_leaves(wanted, shardings or single_device_sharding(jax.local_devices()[0]))
        target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(where[name]))
                  for name, leaf in wanted.items()}
        restored = checkpointer.restore(path, target)
    placed = [jax.device_put(restored[name], where[name], donate=True) if isinstance(where[name], Format)
              else restored[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(expected), placed)


@contextlib.contextmanager
def _damage_found(path: Path) -> Iterator[None]:
    """Whatever Orbax raises inside becomes a CheckpointError: for damaged files that may be anything, a plain Exception
    too. Not so a lack of memory."""
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        why = " ".join(str(error.__cause__ or error).split())[:300]
        raise CheckpointError(f"{path} is damaged or incomplete ({why}); copy or save the checkpoint again") from error


def _stored(checkpointer: Any, path: Path) -> Mapping[str, Any]:
    metadata = checkpointer.metadata(path).item_metadata
    if metadata is None:  # Orbax has logged why
        raise CheckpointError(f"{path} is damaged or incomplete (its metadata cannot be read); copy or save the "
                              "checkpoint again")
    return dict(metadata.tree)


def _check_leaves(directory: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any]) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in wanted]
    problems += [f"{name} is {list(stored[name])}, must be {list(leaf.shape)}"
                 for name, leaf in wanted.items() if name in stored and stored[name] != leaf.shape]
    if problems:
        raise CheckpointError(f"the parameters in {directory} do not fit its config: {'; '.join(problems)}")
