"""The commands on a real engine with a very small model."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from click.testing import CliRunner

import kernels_pallas as kernels
from jaxserve.cli.main import main

BACKENDS = get_args(kernels.Backend)
ENGINE = ("--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--page-size", "16",
          "--num-pages", "80")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[str, ...]:
    """Engine options; the engines of this module share one compilation cache."""
    return (*ENGINE, "--compilation-cache-dir", str(tmp_path_factory.mktemp("xla")))


def run(*args: str, stdin: str | None = None):
    return CliRunner().invoke(main, args, input=stdin, catch_exceptions=False)


def generated_ids(model, *args: str) -> list[list[int]]:
    result = run("generate", str(model), "-p", "Hello", "-p", "Good day", "--temperature", "0", "--max-tokens", "8",
                 "--ignore-eos", "--json", *args)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["outputs"][0]["token_ids"] for line in result.stdout.splitlines()]


def test_generate(tiny_model, compiled):
    ids = generated_ids(tiny_model, *compiled)
    assert [len(of_prompt) for of_prompt in ids] == [8, 8]


def test_generate_reports_a_prompt_that_is_too_long_in_its_place(tiny_model, compiled):
    result = run("generate", str(tiny_model), "-p", "x" * 300, "-p", "Hello", "--max-tokens", "4", *compiled)
    assert result.exit_code == 1
    assert "max_model_len" in result.stdout
    assert "Hello" in result.stdout


def test_chat_streams_answers(tiny_model, compiled):
    result = run("chat", str(tiny_model), "--max-tokens", "4", "--temperature", "0", *compiled, stdin="Hi\nAgain\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout) > 2


def test_convert_writes_a_checkpoint_that_generates_the_same(tiny_model, compiled, tmp_path):
    out = tmp_path / "orbax"
    result = run("convert", str(tiny_model), str(out))
    assert result.exit_code == 0, result.output
    assert generated_ids(out, *compiled) == generated_ids(tiny_model, *compiled)


def test_convert_refuses_a_directory_with_content(tiny_model, tmp_path):
    (tmp_path / "file").write_text("x")
    result = run("convert", str(tiny_model), str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty" in result.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_info_plans_without_weights(tiny_model, dtype):
    result = run("info", str(tiny_model), *ENGINE, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    facts = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines() if line.startswith("  "))
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["attention"] == "4 query heads, 2 kv heads, head size 8"
    assert (facts["dtype"], facts["max_model_len"]) == (dtype, "256")
    # 79 pages beside the dummy hold 4 sequences of 256 tokens.
    assert f" in {dtype}: " in facts["KV pool"] and facts["attention backend"].partition(" (")[0] in BACKENDS
    assert facts["KV pool"].endswith("80 pages of 16 tokens, 4 sequences of full length")
    assert "decode2+prefill32" in facts["compiled shapes"]


@pytest.mark.parametrize(("command", "args"), [("info", ()), ("generate", ("-p", "x")), ("convert", ("out",))])
def test_a_model_that_is_not_there_is_one_line(command, args, tmp_path):
    result = run(command, str(tmp_path / "nothing"), *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and len(result.stderr.splitlines()) == 1
