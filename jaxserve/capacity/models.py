"""Which model is planned: a config is enough, weights are never needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.capacity.known_models import KNOWN_MODELS
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.registry import resolve
from jaxserve.models.spec import DecoderSpec
from jaxserve.weights.source import read_config


@dataclass(frozen=True, kw_only=True)
class Model:
    """`config`: as in config.json. `dtype`: of the checkpoint's weights, None if the config does not say."""

    description: str
    config: Mapping[str, Any]
    spec: DecoderSpec
    dtype: str | None


def find_model(model: str | os.PathLike[str], max_model_len: int | None = None) -> Model:
    """The model of a name in `KNOWN_MODELS`, a config.json, or anything that `open_model` takes.

    Raises:
        CheckpointError, UnsupportedModelError: see `open_model`.
    """
    name = os.fspath(model)
    if name.lower() in KNOWN_MODELS:
        config = KNOWN_MODELS[name.lower()]
        return _model(f"{name.lower()} (its published configuration)", config, str(config["torch_dtype"]),
                      max_model_len)
    try:
        description, config, dtype = read_config(model)
    except UnsupportedModelError:
        raise
    except CheckpointError as error:
        if os.path.exists(name):  # then the error says what is wrong with it
            raise
        raise CheckpointError(f"{error}, a config.json, or one of {', '.join(KNOWN_MODELS)}") from error
    return _model(description, config, dtype, max_model_len)


def _model(description: str, config: Mapping[str, Any], dtype: str | None, max_model_len: int | None) -> Model:
    return Model(description=description, config=config, spec=resolve(dict(config), max_model_len), dtype=dtype)
