"""`jaxserve bench serve` over gRPC."""

from __future__ import annotations

import json

from click.testing import CliRunner

from jaxserve.cli.main import main


def bench(tmp_path, *args, code=0) -> dict:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, [
        "bench", "serve", "--conversations", "6", "--vocab-size", "250", "--input-tokens", "9", "--output-tokens", "5",
        *map(str, args), "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(file.read_text()) | {"said": result.output}


def test_every_token_is_counted(server, tmp_path):
    for args in ([], ["--text", "--request-rate", 50], ["--api", "chat", "--turns", 2]):
        report = bench(tmp_path, "--grpc", server.target, *args)
        facts, requests = report["facts"], report["requests"]
        assert facts["requests"] == facts["requests that ended well"] == len(requests)
        assert all(sum(count for _, count in request["chunks"]) == request["completion_tokens"] == 5
                   for request in requests)
        assert facts["prompt tokens"] == sum(request["prompt_tokens"] for request in requests)
    server.assert_idle()


def test_refusals_and_absent_servers_are_counted_and_told_of_once(server, tmp_path):
    report = bench(tmp_path, "--grpc", server.target, "--input-tokens", 900, code=1)
    assert report["facts"]["failed: RequestError"] == 6
    line, = [line for line in report["said"].splitlines() if "a request failed" in line]
    assert "RequestError: " in line and "max_model_len" in line
    report = bench(tmp_path, "--grpc", "127.0.0.1:1", code=1)
    assert report["facts"]["failed: UNAVAILABLE"] == 6
