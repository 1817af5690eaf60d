from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.executables import Executables, compilations


def lower(key: int) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * key).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


class Lowered:
    """Stands in for jax.stages.Lowered."""

    def __init__(self, compile_):
        self.compile = compile_


def test_a_program_is_compiled_when_it_is_met_and_once():
    executables = Executables(lower, "")
    before = compilations()
    for _ in range(2):
        np.testing.assert_array_equal(executables.get(7)(np.ones(3, np.float32)), [7, 7, 7])
    assert compilations() == before + 1
    assert (len(executables), 7 in executables, 8 in executables) == (1, True, False)


def test_all_at_once_skips_what_is_there():
    executables = Executables(lower, "")
    executables.get(1)
    before, done = compilations(), []
    executables.compile_all([1, 2, 3, 2], done.append)
    assert sorted(done) == [2, 3]
    assert compilations() == before + 2
    assert executables.seconds.keys() == {1, 2, 3} and all(seconds > 0 for seconds in executables.seconds.values())
    executables.compile_all([1, 2, 3], done.append)
    assert compilations() == before + 2


def test_a_program_takes_its_own_shapes_and_no_others():
    program = Executables(lower, "").get(7)
    before = compilations()
    with pytest.raises(TypeError, match="compiled"):
        program(np.ones(4, np.float32))
    assert compilations() == before


def test_compiling_is_parallel_and_tracing_is_not(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # two threads
    together = threading.Barrier(2, timeout=60)
    traced_in = set()

    def lower(key: int):
        traced_in.add(threading.get_ident())
        return Lowered(together.wait)  # breaks if the two do not meet

    Executables(lower, "").compile_all([1, 2])  # type: ignore[arg-type]
    assert traced_in == {threading.get_ident()}


@pytest.mark.parametrize("stage", ["lower", "compile"])
def test_a_failure_is_raised_and_what_was_compiled_stays(stage):
    broken = True

    def fail():
        raise RuntimeError("no program 2")

    def lower_or_fail(key: int):
        if key == 2 and broken:
            return fail() if stage == "lower" else Lowered(fail)
        return lower(key)

    executables = Executables(lower_or_fail, "")
    executables.compile_all([1])
    with pytest.raises(RuntimeError, match="no program 2"):
        executables.compile_all([1, 2, 3])
    assert 1 in executables and 2 not in executables
    with pytest.raises(RuntimeError, match="no program 2"):
        executables.get(2)
    broken = False
    executables.compile_all([1, 2, 3])
    assert len(executables) == 3


def test_an_interrupt_while_tracing_waits_only_for_what_has_begun(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun, released, compiled = threading.Event(), threading.Event(), []
    shutdown = ThreadPoolExecutor.shutdown

    def shutdown_and_release(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:  # it would wait for ever
            released.set()
        shutdown(self, wait, cancel_futures=cancel_futures)
        released.set()

    def compile_when_released(key: int) -> None:
        begun.set()
        released.wait()
        compiled.append(key)

    def lower_or_interrupt(key: int):
        if key == 3:
            begun.wait()
            raise KeyboardInterrupt
        return Lowered(lambda: compile_when_released(key))

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown_and_release)
    with pytest.raises(KeyboardInterrupt):
        Executables(lower_or_interrupt, "").compile_all([1, 2, 3])  # type: ignore[arg-type]
    assert compiled == [1]


def test_compilations_of_others_are_counted_too():
    before = compilations()
    jax.jit(lambda x: x * 12345)(np.ones(3))
    assert compilations() == before + 1


def test_clear_forgets():
    executables = Executables(lower, "")
    executables.get(1)
    executables.clear()
    assert len(executables) == 0
