from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.runtime.runner import Runner
from tests.runtime.rig import Rig, make_params, make_plan, make_runner


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Programs that several tests need are compiled once."""
    return str(tmp_path_factory.mktemp("xla"))


@pytest.fixture(scope="session")
def shared_runner(xla_cache: str) -> Runner:
    runner = make_runner(make_plan(), make_params(), xla_cache)
    runner.compile()
    return runner


@pytest.fixture
def rig(shared_runner: Runner) -> Iterator[Rig]:
    """A float32 runner with everything compiled and an empty state."""
    shared_runner.reset_state()
    yield Rig(shared_runner)
