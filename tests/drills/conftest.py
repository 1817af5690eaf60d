from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.process import write_tiny


@pytest.fixture(scope="session")
def xla_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs: shared by all engines here, and kept for the next run where pytest keeps its own cache."""
    if getattr(pytestconfig, "cache", None) is None:
        return str(tmp_path_factory.mktemp("xla"))
    return str(pytestconfig.cache.mkdir("xla"))


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return directory
