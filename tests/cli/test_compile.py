"""`jaxserve compile` fills the cache that engines start from."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from jaxserve import LLM
from jaxserve.cli.main import main

OPTIONS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 16, "num_pages": 9,
           "deterministic": True}
ARGS = [f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in OPTIONS.items()]
PROGRAMS = {"admit", "decode0+prefill32", "decode2+prefill0"}


def run(model, cache, *args: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in this one, jax may still have programs of the engines of other tests."""
    return subprocess.run([sys.executable, "-m", "jaxserve", "compile", str(model), *ARGS, "--compilation-cache-dir",
                           str(cache), *args], capture_output=True, text=True)


def programs(output: str, how: str) -> set[str]:
    return set(re.findall(rf"^{how} +\d+\.\d\d s  (\S+)$", output, re.MULTILINE))


@pytest.fixture(scope="module")
def filled(tiny_model, tmp_path_factory):
    """A cache that the command filled, and what it said."""
    cache = tmp_path_factory.mktemp("xla")
    result = run(tiny_model, cache)
    assert result.returncode == 0, result.stderr
    return cache, result.stdout


def test_everything_is_compiled_and_kept(filled):
    cache, output = filled
    assert programs(output, "compiled") == PROGRAMS and not programs(output, "in the cache")
    assert "3 compiled, 0 in the cache at " + str(cache) in output
    assert any(cache.iterdir())


def test_a_second_run_finds_everything(filled, tiny_model):
    result = run(tiny_model, filled[0])
    assert programs(result.stdout, "in the cache") == PROGRAMS and not programs(result.stdout, "compiled")
    assert "0 compiled, 3 in the cache" in result.stdout


def test_other_options_are_other_programs(filled, tiny_model):
    result = run(tiny_model, filled[0], "--num-pages", "10")
    assert programs(result.stdout, "in the cache") == {"admit"}  # only steps know the pool


def test_an_engine_starts_from_it(filled, tiny_model):
    with LLM(tiny_model, **OPTIONS, compilation_cache_dir=str(filled[0]), compile_mode="eager") as llm:
        assert llm._runner._executables.from_cache == set(llm._runner.plan.programs)


def test_a_pool_that_depends_on_free_memory_is_pointed_out(filled, tiny_model, monkeypatch):
    from jaxserve.runtime import memory
    # Two thirds of it are not for the pool; a page takes 4 KB.
    monkeypatch.setattr(memory, "available_ram", lambda: 280_000)
    args = [arg for arg in ARGS if "num-pages" not in arg]
    result = CliRunner().invoke(main, ["compile", str(tiny_model), *args, "--compilation-cache-dir", str(filled[0])])
    assert re.search(r"KV pool of (\d) pages .*--num-pages \1 fixes it", result.stdout), result.output


def test_without_a_cache_there_is_nothing_to_fill(tiny_model):
    result = run(tiny_model, "")
    assert result.returncode == 2
    assert "compilation_cache_dir=''" in result.stderr and "give a directory" in result.stderr
