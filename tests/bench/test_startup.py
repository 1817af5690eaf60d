"""`bench startup` measures new processes."""

import pytest

from jaxserve.bench.startup import PHASES, startup
from jaxserve.errors import EngineError


def test_a_process_that_fails_is_reported_with_its_reason(tmp_path):
    with pytest.raises(EngineError, match="CheckpointError"):
        startup(str(tmp_path / "nothing"), {}, repetitions=1)


@pytest.mark.slow
def test_cold_and_warm_processes_are_measured_from_their_start(tiny_model):
    options = {"max_model_len": 256, "max_num_seqs": 1, "num_pages": 20}
    report = startup(str(tiny_model), options, repetitions=1)
    for temperature in ("cold", "warm"):
        (total,) = report.samples[f"{temperature} total_s"]
        phases = sum(report.samples[f"{temperature} {phase}"][0] for phase in PHASES)
        assert 0 < phases < total  # the interpreter's own start is in the total only
    assert report.options == options
