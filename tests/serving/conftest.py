"""Engines with very small models, as in tests/llm, and with its cache of compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve import LLM
from tests.drills.process import write_tiny
from tests.llm import tiny


@pytest.fixture(scope="session")
def xla_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs: shared by all engines here, and kept for the next run where pytest keeps its own cache."""
    if getattr(pytestconfig, "cache", None) is None:
        return str(tmp_path_factory.mktemp("xla"))
    return str(pytestconfig.cache.mkdir("xla"))


@pytest.fixture(scope="session")
def make_llm(xla_cache) -> Callable[..., LLM]:
    def make(params=None, **options) -> LLM:
        return LLM(config=tiny.CONFIG, params=tiny.random_tensors() if params is None else params,
                   tokenizer=tiny.tokenizer(), **(tiny.ENGINE | {"compilation_cache_dir": xla_cache} | options))

    return make


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory) -> Path:
    """The tiny model as files, for servers that are processes."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return directory
