"""What a call does with its requests, whatever the engine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxserve import RequestError, SamplingParams, offline
from jaxserve.inputs import failed_output
from jaxserve.outputs import StreamEvent


class Engine:
    """Keeps what it is given. `finish` ends a request; with `at_once` all end as they come."""

    def __init__(self, at_once: bool = False):
        self.at_once = at_once
        self.log: list[str] = []
        self.listeners: list = []
        self.request_ids: list[str] = []
        self.aborted: set[str] = set()

    def process(self, item, _):
        self.log.append(f"process {item}")
        if item == "bad":
            raise RequestError("bad", "prompt")
        return item

    def submit(self, processed, on_event, request_id=None, *, patient=False):
        self.log.append(f"submit {processed}")
        self.listeners.append(on_event)
        self.request_ids.append(request_id)
        if self.at_once:
            self.finish(len(self.listeners) - 1)

    def abort(self, request_id):
        self.aborted.add(request_id)

    def settle(self):
        pass

    def finish(self, number: int) -> None:
        output = failed_output(f"output {number}", RequestError("the model has failed"))
        self.listeners[number](StreamEvent(0, "", [], output=output))


def start(engine, items, process=None):
    return offline.arun(engine, items, [SamplingParams()] * len(items), process or engine.process, single=False,
                        use_tqdm=False)


@pytest.mark.parametrize("in_loop", [False, True])
def test_requests_start_while_later_ones_are_processed(in_loop):
    engine = Engine(at_once=True)
    items = ["a", "bad", "b"]
    if in_loop:
        outputs = asyncio.run(start(engine, items))
    else:
        outputs = offline.run(engine, items, [SamplingParams()] * 3, engine.process, single=False, use_tqdm=False)
    assert engine.log == ["process a", "submit a", "process bad", "process b", "submit b"]
    assert [output.prompt for output in outputs] == ["output 0", "bad", "output 1"]


@pytest.mark.parametrize("ticks", range(6))
def test_a_cancellation_that_comes_with_an_output_is_not_lost(ticks):
    async def main():
        engine = Engine()
        task = asyncio.create_task(start(engine, ["a", "b"]))
        while len(engine.listeners) < 2:
            await asyncio.sleep(0)
        engine.finish(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        assert engine.aborted == set(engine.request_ids)

    asyncio.run(main())


def test_nothing_starts_after_a_cancellation():
    async def main():
        engine, reached, go_on = Engine(), threading.Event(), threading.Event()

        def process(item, params):
            if item == "b":
                reached.set()
                go_on.wait()
            return engine.process(item, params)

        task = asyncio.create_task(start(engine, ["a", "b", "c"], process))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        go_on.set()
        return engine

    engine = asyncio.run(main())  # returns when its threads have ended
    assert engine.log == ["process a", "submit a", "process b"]
    assert engine.aborted >= set(engine.request_ids)


def test_what_fails_while_requests_start_is_raised():
    engine = Engine()

    def process(item, params):
        if item == "b":
            raise ZeroDivisionError
        return engine.process(item, params)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(start(engine, ["a", "b"], process))
    assert engine.aborted >= set(engine.request_ids)
