"""The script for machines with a GPU works, as far as a CPU can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import device_check


def test_the_smoke_run_checks_steps_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.json"
    assert device_check.main(["--smoke", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())
    assert {row["backend"] for row in rows["checks"]} >= {"xla"} and all(row["right"] for row in rows["checks"])
    assert rows["steps"][0]["model"] == "qwen3-0.6b" and rows["steps"][0]["ms"] > 0
    assert {row["rows"] for row in rows["attention"]} == {1, 64}
    assert "0 wrong" in capsys.readouterr().out


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    right = device_check.attend
    monkeypatch.setattr(device_check, "attend", lambda trial, backend, *args: right(trial, backend, *args) + (
        0.1 if backend == "xla" else 0))
    monkeypatch.setattr(device_check, "STEP_MODELS", ())
    monkeypatch.setattr(device_check, "attention_table", lambda *args: iter(()))
    assert device_check.main(["--smoke"]) == 1
    assert "WRONG xla" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out_and_nothing_checked_is_no_success(capsys: pytest.CaptureFixture[str]):
    assert device_check.main(["--smoke", "--seconds", "0"]) == 1
    assert "left out" in capsys.readouterr().out
