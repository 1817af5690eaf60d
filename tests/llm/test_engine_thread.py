"""The engine's thread answers everyone, also while it ends."""

from __future__ import annotations

import threading

import pytest

from jaxserve.engine.async_engine import EngineThread
from jaxserve.errors import EngineClosedError, EngineError


class Core:
    """An engine core without work."""

    has_work = False

    def __init__(self):
        self.ended_with: list[object] = []

    def abort_all(self):
        self.ended_with.append("abort")

    def fail_all(self, cause):
        self.ended_with.append(cause)

    def step(self):
        raise AssertionError("there is no work")


@pytest.fixture
def thread():
    thread = EngineThread(Core(), on_close=lambda: None)
    yield thread
    thread.close()


def test_a_call_returns_or_raises_what_its_function_does(thread):
    assert thread.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    assert thread.call(lambda: thread.call(lambda: 4)) == 4  # inside the engine's thread


def test_everyone_is_answered_while_it_closes(thread):
    answers: list[Exception] = []

    def ask():
        try:
            while True:
                thread.call(lambda: None)
        except EngineClosedError as error:
            answers.append(error)

    callers = [threading.Thread(target=ask) for _ in range(8)]
    for caller in callers:
        caller.start()
    thread.close()
    for caller in callers:
        caller.join()
    assert len(answers) == 8
    assert thread.closed


def test_what_was_asked_before_close_is_done(thread):
    done = []
    for i in range(100):
        thread.call_soon(lambda i=i: done.append(i))
    thread.close()
    assert done == list(range(100))


def test_it_frees_the_engine_last():
    order = []
    core = Core()
    core.abort_all = lambda: order.append("abort")
    thread = EngineThread(core, on_close=lambda: order.append("free"))
    thread.on_end(lambda fault: order.append(fault))
    thread.close()
    thread.close()
    assert order == ["abort", None, "free"]


def test_a_listener_that_fails_keeps_the_end_from_nobody(caplog):
    order = []
    thread = EngineThread(Core(), on_close=lambda: order.append("free"))
    thread.on_end(lambda _: 1 / 0)
    thread.on_end(lambda _: order.append("told"))
    thread.close()
    assert order == ["told", "free"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("fault", [None, SystemError("bug")])
def test_who_asks_after_the_end_is_told_at_once(fault):
    def fail():
        raise fault

    thread, told = EngineThread(Core(), on_close=lambda: None), []
    if fault is None:
        thread.close()
    else:
        thread.call_soon(fail)
        thread._thread.join()
    thread.on_end(told.append)
    assert told == [fault]


@pytest.mark.parametrize("waiting", [False, True])
def test_everyone_is_answered_when_it_fails(waiting):
    core, freed, answers = Core(), [], []
    thread = EngineThread(core, on_close=lambda: freed.append(True))
    fault = SystemError("bug")
    hold = threading.Event()

    def fail():
        hold.wait()
        raise fault

    def ask():
        try:
            thread.call(lambda: None)
        except EngineError as error:
            answers.append(error)

    thread.call_soon(fail)
    callers = [threading.Thread(target=ask) for _ in range(4 if waiting else 0)]
    for caller in callers:
        caller.start()
    hold.set()
    for caller in callers:
        caller.join()
    thread._thread.join()
    assert core.ended_with == [fault] and freed == [True]
    assert len(answers) == len(callers) and all(error.__cause__ is fault for error in answers)
    with pytest.raises(EngineClosedError, match="failed") as caught:
        thread.call(lambda: None)
    assert caught.value.__cause__ is fault
