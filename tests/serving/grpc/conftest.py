from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from jaxserve import LLM
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from tests.llm import tiny
from tests.serving.grpc.harness import Loop, Running, running

# Deterministic, so that answers can be compared that were computed in different company.
ENGINE = tiny.ENGINE | {"max_model_len": 512, "num_pages": 200, "deterministic": True}


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def llm(xla_cache) -> Iterator[LLM]:
    """Random weights."""
    with LLM(config=tiny.CONFIG, params=tiny.random_tensors(), tokenizer=tiny.tokenizer(),
             **ENGINE, compilation_cache_dir=xla_cache) as llm:
        yield llm


@pytest.fixture(scope="session")
def parrot(xla_cache) -> Iterator[LLM]:
    """Answers "a" with the rest of the alphabet and </s>, and "[" with "é🎉]", a byte a token."""
    chains = ([*b"abcdefghijklmnopqrstuvwxyz", tiny.EOS], "[é🎉]".encode())
    with LLM(config=tiny.CONFIG, params=tiny.parrot_tensors(*chains), tokenizer=tiny.tokenizer(),
             **ENGINE, compilation_cache_dir=xla_cache) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(loop, llm) -> Iterator[Running]:
    """A server of `llm`. Shared, so each test must leave it idle."""
    with running(loop, llm) as server:
        yield server


@pytest.fixture(scope="session")
def parrot_server(loop, parrot) -> Iterator[Running]:
    with running(loop, parrot) as server:
        yield server


@pytest.fixture
def channel(server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as channel:
        yield channel


@pytest.fixture
def stub(channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)
