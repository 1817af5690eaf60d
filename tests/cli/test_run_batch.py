"""`jaxserve run-batch` on a real engine with a very small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from click.testing import CliRunner

from jaxserve.cli.main import main

ENGINE = ("--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--page-size", "16",
          "--num-pages", "20")
GOOD = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/completions",
                   "body": {"model": "small", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}})


def run(*args: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["run-batch", *args], input=stdin)


def test_files(tiny_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f"{GOOD}\n{{\n")
    result = run("-i", str(source), "-o", str(target), "--model", str(tiny_model), "--served-model-name", "small",
                 *ENGINE)
    assert result.exit_code == 1 and "2 requests, 1 of them failed; 3 tokens" in result.stderr, result.output
    records = {record["custom_id"]: record for record in map(json.loads, target.read_text().splitlines())}
    assert records["one"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert records[None]["error"]["code"] == "invalid_json_line"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_pipes(tiny_model):
    result = run("-i", "-", "-o", "-", "--model", str(tiny_model), "--served-model-name", "small", *ENGINE, stdin=GOOD)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["response"]["status_code"] == 200


def test_a_pipe_is_written_to_and_not_replaced(tiny_model, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = run("-i", "-", "-o", str(pipe), "--model", str(tiny_model), "--served-model-name", "small", *ENGINE,
                     stdin=GOOD)
        assert result.exit_code == 0, result.output
        assert json.loads(os.read(reader, 1 << 16))["response"]["status_code"] == 200
    finally:
        os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_nothing_is_left_when_the_model_does_not_open(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(GOOD)
    target.write_text("of yesterday")
    result = run("-i", str(source), "-o", str(target), "--model", str(tmp_path / "nothing"))
    assert result.exit_code != 0
    assert target.read_text() == "of yesterday" and len(list(tmp_path.iterdir())) == 2


def test_nothing_is_left_when_it_is_terminated(tiny_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "small", "prompt": "Hello", "max_tokens": 50, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    source.write_text("\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(10_000)))  # minutes of work
    command = [sys.executable, "-m", "jaxserve", "run-batch", "-i", str(source), "-o", str(target), "--model",
               str(tiny_model), "--served-model-name", "small", *ENGINE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("service: ready" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_wrong_is_said_before_the_model_is_opened(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for args, message in (
            (("-i", str(empty), "-o", "-", "--model", "x"), "holds no requests"),
            (("-i", str(tmp_path / "none"), "-o", "-", "--model", "x"), "No such file"),
            (("-i", "-", "-o", str(tmp_path / "no" / "out"), "--model", "x"), "cannot write"),
            (("-i", "-", "-o", "", "--model", "x"), "--output-file is empty"),
            (("-i", "-", "-o", "-", "--model", "x", "--max-num-seqs", "0"), "max_num_seqs")):
        result = run(*args, stdin=GOOD)
        assert result.exit_code == 2 and message in result.stderr


def test_answers_never_replace_their_requests(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(GOOD)
    (tmp_path / "link.jsonl").symlink_to(source)
    for target in (source, tmp_path / "link.jsonl"):
        result = run("-i", str(source), "-o", str(target), "--model", "x")
        assert result.exit_code == 2 and "would replace" in result.stderr
    assert source.read_text() == GOOD
