"""`jaxserve bench serve` against a real server."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from jaxserve.cli.main import main

LOAD = ["--conversations", "6", "--warmup", "1", "--vocab-size", "250"]


def bench(tmp_path, *args, code=0) -> dict:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["bench", "serve", *LOAD, *map(str, args), "--json", str(file)],
                                catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(file.read_text())


@pytest.mark.parametrize("arrivals", [["--concurrency", 3], ["--request-rate", 50]])
def test_every_token_is_counted(server, tmp_path, arrivals):
    report = bench(tmp_path, "--url", server.url, "--input-tokens", "5-9", "--output-tokens", "4-8",
                   "--slo", "ttft=1000s", *arrivals)
    facts, requests = report["facts"], report["requests"]
    assert facts["requests"] == facts["requests that ended well"] == len(requests) == 6
    assert facts["output tokens"] == sum(request["completion_tokens"] for request in requests)
    assert all(4 <= request["completion_tokens"] == sum(count for _, count in request["chunks"]) <= 8
               for request in requests)
    assert facts["prompt tokens"] == sum(request["prompt_tokens"] for request in requests)
    assert facts["share within the SLOs"] == 1 and "tokens of a chunk" not in facts
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        numbers = report["distributions"][name]
        assert 0 <= numbers["p50"] <= numbers["p90"] <= numbers["p99"] <= numbers["max"]
    assert report["environment"]["cpu"]


def test_turns_and_shared_prefixes_come_from_the_prefix_cache(server, tmp_path):
    report = bench(tmp_path, "--url", server.url, "--input-tokens", 4, "--output-tokens", 4, "--concurrency", 1,
                   "--shared-prefix", 40, "--turns", 3)
    assert len(report["requests"]) == 18
    first, second, third = report["requests"][3:6]
    assert [request["prompt_tokens"] for request in (first, second, third)] == [44, 52, 60]
    assert all(request["cached_tokens"] >= 40 for request in (first, second, third))


def test_chats_and_texts(server, tmp_path):
    for args in (["--api", "chat"], ["--text"]):
        report = bench(tmp_path, "--url", f"{server.url}/v1", "--input-tokens", 2, "--output-tokens", 4, "--turns", 2,
                       *args)
        assert report["facts"]["requests that ended well"] == 12
        assert report["facts"]["output tokens"] == 48


def test_datasets(server, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "Hello", "max_tokens": 2}\n{"prompt": "Good day"}\n')
    report = bench(tmp_path, "--url", server.url, "--dataset", tmp_path / "data.jsonl", "--output-tokens", 5)
    assert [request["prompt_tokens"] for request in report["requests"]] == [8, 5] * 3
    assert [request["completion_tokens"] for request in report["requests"]] == [5, 2] * 3


def test_refusals_are_counted(server, tmp_path):
    report = bench(tmp_path, "--url", server.url, "--input-tokens", 500, code=1)
    assert report["facts"]["failed: HTTP 400"] == 6
