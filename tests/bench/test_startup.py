"""`bench startup` measures new processes."""

import pytest

from jaxserve.bench.startup import startup
from jaxserve.errors import EngineError


def test_a_process_that_fails_is_reported_with_its_reason(tmp_path):
    with pytest.raises(EngineError, match="CheckpointError"):
        startup(str(tmp_path / "nothing"), {}, repetitions=1)
