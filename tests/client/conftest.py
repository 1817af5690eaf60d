from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.client import Client
from tests.serving.conftest import xla_cache  # noqa: F401
from tests.serving.grpc.conftest import llm, loop, parrot, parrot_server, server  # noqa: F401


@pytest.fixture
def client(server) -> Iterator[Client]:  # noqa: F811
    with Client(server.target) as client:
        yield client
