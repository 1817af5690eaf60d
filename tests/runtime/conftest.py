from __future__ import annotations

import pytest

from jaxserve.runtime.executables import Executables
from jaxserve.runtime.runner import Runner
from tests.runtime.rig import Rig, make_params, make_plan


@pytest.fixture(scope="session")
def xla_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs: shared by these tests, and kept for the next run where pytest keeps its own cache."""
    if getattr(pytestconfig, "cache", None) is None:  # -p no:cacheprovider
        return str(tmp_path_factory.mktemp("xla"))
    return str(pytestconfig.cache.mkdir("xla"))


@pytest.fixture(scope="session")
def executables(xla_cache: str) -> Executables:
    """All programs of the default plan."""
    plan = make_plan()
    executables = Executables(plan.lower, xla_cache)
    executables.compile_all(plan.programs)
    return executables


@pytest.fixture(scope="session")
def shared_runner(executables: Executables) -> Runner:
    return Runner(make_plan(), make_params(), executables)


@pytest.fixture
def rig(shared_runner: Runner) -> Rig:
    """A float32 runner with everything compiled and an empty state."""
    shared_runner.reset_state()
    return Rig(shared_runner)
