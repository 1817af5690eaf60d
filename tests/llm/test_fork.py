"""A process that is forked after an engine was made has no engine, and is told so instead of waiting for ever."""

from __future__ import annotations

import os
import warnings

import pytest

from tests.llm import tiny


def in_a_fork(function) -> str:
    """What `function` returns in a fork of this process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax's and Python's own, that forks of threaded processes may hang
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize("method", ["generate", "stream", "metrics"])
def test_a_fork_says_what_to_do(llm, method):
    def call() -> str:
        try:
            if method == "metrics":
                llm.metrics()
            else:
                list(getattr(llm, method)(tiny.prompt_ids(3), max_tokens=2))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it answered"

    said = in_a_fork(call)
    assert said.startswith("EngineClosedError: ") and f"process {os.getpid()}" in said and "spawn" in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_closing_in_a_fork_leaves_the_engine_to_its_own_process(make_llm):
    with make_llm() as llm:
        assert in_a_fork(lambda: str(llm.close())) == "None"
        (output,) = llm.generate(tiny.prompt_ids(3), max_tokens=2, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
