"""Numbers of the engine's steps and faults, and what becomes of a server whose steps fail."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.results import Fault
from jaxserve.serving.service import State
from tests.serving.http.conftest import serving
from tests.serving.http.test_server import COMPLETION, samples


def pages(http) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    return {sample.labels["state"]: sample.value for sample in families["jaxserve:pages"].samples}


def test_steps(http):
    before = samples(http)
    http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
    after = samples(http)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    steps = gained("jaxserve:steps_total")
    assert steps >= 4
    for name in ("jaxserve:step_seconds", "jaxserve:step_host_seconds", "vllm:iteration_tokens_total"):
        assert gained(f"{name}_count") == steps
    assert gained("vllm:iteration_tokens_total_sum") == gained("jaxserve:token_rows_total") >= 5 + 3
    assert 0 < gained("jaxserve:step_host_seconds_sum") <= gained("jaxserve:step_seconds_sum")


def test_pages_by_state(make_llm):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        assert pages(http) == {"used": 0, "cached": 0, "free": 27}
        http.post("/v1/completions", json={"prompt": "x" * 30, "max_tokens": 1})
        assert pages(http) == {"used": 0, "cached": 3, "free": 24}, "30 tokens fill 3 pages of 8"


def test_a_step_that_fails_once_is_counted_and_heals(make_llm, monkeypatch):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        body = COMPLETION | {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        expected = http.post("/v1/completions", json=body).json()["choices"]
        launch, failing = llm._runner.launch, [True]

        def fails_once(plan):
            if failing and plan.decodes:
                failing.pop()
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return launch(plan)

        monkeypatch.setattr(llm._runner, "launch", fails_once)
        assert http.post("/v1/completions", json=body).json()["choices"] == expected
        assert samples(http)["jaxserve:step_failures_total"] == 1
        assert http.get("/health").status_code == 200


def test_a_device_that_stays_broken_ends_the_engine(make_llm, monkeypatch):
    """Else the server would answer every request with 500 for ever, and look healthy."""
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        def broken(plan):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(llm._runner, "launch", broken)
        for health in (200, 200, 503):
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json=COMPLETION).status_code == 500
            while health == 503 and server.service.state is not State.FAILED:
                pass
            assert http.get("/health").status_code == health
        assert http.get("/health").json() == {"status": "failed"}


def test_requests_with_nan_are_counted(make_llm, monkeypatch):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        fetch = llm._runner.fetch

        def fetch_with_fault(launched):
            result = fetch(launched)
            for seq_id in result.token_ids:
                result.failed[seq_id], result.token_ids[seq_id] = Fault.NOT_FINITE, []
            return result

        monkeypatch.setattr(llm._runner, "fetch", fetch_with_fault)
        answer = http.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 500
        monkeypatch.setattr(llm._runner, "fetch", fetch)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        assert samples(http)["vllm:corrupted_requests_total"] == 1


def test_masks_that_leave_nothing_are_no_fault_of_the_model(http):
    """Which only shows behind the first token: alone it is no bad word."""
    before = samples(http)["vllm:corrupted_requests_total"]
    answer = http.post("/v1/completions", json={
        "prompt": "b", "max_tokens": 4, "allowed_token_ids": [ord("a")], "bad_words": ["aa"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words" and "no token is left" in answer.json()["error"]["message"]
    assert samples(http)["vllm:corrupted_requests_total"] == before


@pytest.mark.slow
def test_promtool_accepts_the_metrics(http):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    http.post("/v1/completions", json=COMPLETION)
    text = http.get("/metrics").text
    check = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
    # vLLM's names have colons, which Prometheus keeps for recording rules, and one histogram is called "_total".
    known = re.compile(r"\S+ metric names should not contain ':'"
                       r"|vllm:iteration_tokens_total non-counter metrics should not have \"_total\" suffix")
    others = [line for line in (check.stdout + check.stderr).splitlines() if not known.fullmatch(line)]
    assert check.returncode in (0, 3) and not others, others  # 3: it found something to complain about
