"""`jaxserve plan`: answers for devices that are not here."""

from __future__ import annotations

import importlib.util
import json

import pytest
from click.testing import CliRunner

from jaxserve.capacity import jobs
from jaxserve.cli.main import main

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None


def run(*args: str):
    return CliRunner().invoke(main, ["plan", *args], env={"COLUMNS": "160"})


@pytest.fixture
def no_compilers(monkeypatch):
    monkeypatch.setattr(jobs, "missing_compiler", lambda target: "pip install '.[tpu]'")


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-0.6b", "gemma-2-9b"])
@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "gpu:h100x8", "gpu:a100x1"])
def test_it_answers_without_accelerators_and_their_packages(model, target, no_compilers):
    result = run("--model", model, "--target", target)
    assert result.exit_code == 0, result.output
    for words in ("Memory of one device", "weights", "KV pool", "Least time of a decode step", "Compiled shapes",
                  "estimated", "pip install '.[tpu]'"):
        assert words in result.stdout


def test_json_has_the_numbers(no_compilers):
    result = run("--model", "llama-3-8b", "--target", "tpu:v5e:2x4", "--json", "--max-num-seqs", "64")
    plan = json.loads(result.stdout)
    assert plan["mesh"] == {"data": 4, "tensor": 2}
    assert plan["temporaries_are"] == "estimated"
    assert plan["per_device"]["weights_bytes"] == 8_030_527_488
    assert plan["kv_cache"]["bytes_per_token"] == 65536
    assert [floor["batch"] for floor in plan["decode_steps"]] == [1, 4, 16, 64]
    assert plan["engine"]["max_num_seqs"] == 64 and "decode64+prefill0" in plan["engine"]["buckets"]


def test_a_context_longer_than_the_engine_s_is_refused(no_compilers):
    result = run("--target", "tpu:v6e:1x1", "--model", "qwen3-0.6b", "--max-model-len", "128", "--context", "129")
    assert result.exit_code == 2
    assert "context=129 is more than max_model_len=128" in result.stderr


def test_batches_and_context_can_be_chosen(no_compilers):
    result = run("--model", "qwen3-0.6b", "--target", "gpu:t4", "--json", "--batch", "3", "--batch", "5",
                 "--context", "100")
    floors = json.loads(result.stdout)["decode_steps"]
    assert [(floor["batch"], floor["context"]) for floor in floors] == [(3, 100), (5, 100)]


@pytest.mark.parametrize("args, words", [
    (("--model", "llama-3-8b", "--target", "gpu:b300"), "unknown target 'gpu:b300'; known: "),
    (("--model", "llama-3-8b", "--target", "gpu:h100", "--gpu-memory-fraction", "nan"), "not a finite number"),
    (("--model", "llama-3-8b", "--target", "gpu:t4"), "GiB too little; lower max_model_len"),
    (("--model", "lama-3-8b", "--target", "gpu:t4"), "or one of llama-3-8b"),
    (("--model", "llama-3-8b", "--target", "gpu:h100", "--max-model-len", "9000"), "has 8192 positions")])
def test_mistakes_are_one_line(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr and sum("Error: " in line for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_a_broken_directory_is_not_taken_for_a_misspelled_name(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = run("--model", str(tmp_path), "--target", "gpu:t4")
    assert result.exit_code == 2
    assert "config.json" in result.stderr and "one of llama-3-8b" not in result.stderr


def test_this_machine_s_cpu_is_compiled_for(tiny_model):
    result = run("--model", str(tiny_model), "--target", "cpu", "--json", "--max-model-len", "64", "--max-num-seqs",
                 "2", "--max-num-batched-tokens", "32", "--page-size", "16", "--num-pages", "4000", "--deterministic")
    plan = json.loads(result.stdout)
    assert plan["temporaries_are"] == "compiled"
    assert [program["program"] for program in plan["compiled"]] == ["decode2+prefill0", "decode0+prefill32"]
    for program in plan["compiled"]:
        assert program["error"] is None
        assert program["alias_bytes"] >= program["pool_bytes"] == plan["per_device"]["pool_bytes"]
    assert plan["per_device"]["temp_bytes"] == max(program["temp_bytes"] for program in plan["compiled"])


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="libtpu is not installed: pip install '.[tpu]'")
def test_a_tpu_is_compiled_for_where_its_compiler_is(tiny_model):
    result = run("--model", "llama-3.2-1b", "--target", "tpu:v6e:1x1", "--json", "--deterministic")
    assert json.loads(result.stdout)["temporaries_are"] == "compiled"
