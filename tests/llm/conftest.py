"""Engines with very small models, and what they should say according to plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from jaxserve import LLM
from tests.llm import tiny
from tests.llm.dense import DenseLlama


@pytest.fixture(scope="session")
def xla_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs: shared by all engines here, and kept for the next run where pytest keeps its own cache."""
    if getattr(pytestconfig, "cache", None) is None:  # -p no:cacheprovider
        return str(tmp_path_factory.mktemp("xla"))
    return str(pytestconfig.cache.mkdir("xla"))


@pytest.fixture(scope="session")
def make_llm(xla_cache) -> Callable[..., LLM]:
    """LLM(...) of a tiny model: `params` (default: random ones), `tokenizer` and engine options may be given."""

    def make(params=None, tokenizer: object = "default", **options) -> LLM:
        return LLM(config=tiny.CONFIG, params=tiny.random_tensors() if params is None else params,
                   tokenizer=tiny.tokenizer() if tokenizer == "default" else tokenizer,
                   **(tiny.ENGINE | {"compilation_cache_dir": xla_cache} | options))

    return make


@pytest.fixture(scope="session")
def llm(make_llm) -> Iterator[LLM]:
    """Random weights, everything compiled. Shared by most tests, so each must leave it idle."""
    with make_llm(compile_mode="eager") as llm:
        yield llm


@pytest.fixture(scope="session")
def dense() -> DenseLlama:
    """The same weights in plain numpy."""
    return DenseLlama(tiny.CONFIG, tiny.random_tensors(), tiny.tokenizer().vocab_size)


@pytest.fixture(scope="session")
def parrot_engine(make_llm) -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture
def parrot_of(parrot_engine) -> Callable[..., LLM]:
    """An engine whose model is tiny.parrot_tensors(*chains), until the next call."""

    def make(*chains) -> LLM:
        parrot_engine.update_params(tiny.parrot_tensors(*chains))
        return parrot_engine

    return make


@pytest.fixture
def parrot(parrot_of) -> LLM:
    """Answers "a" with the rest of the alphabet and </s>."""
    return parrot_of([*b"abcdefghijklmnopqrstuvwxyz", tiny.EOS])
