"""The engine's thread. All faces (blocking, streaming, asyncio, servers) talk to it through an inbox.

A thread and not a process: nothing to pickle, errors keep their traceback, and a notebook's event loop
or interrupt cannot reach into a step. Callbacks run in this thread and only hand over to queues; those
about what came as the engine ended may run in the thread that it came from.

Whatever happens to the thread, nobody waits for it in vain: what it was asked for and cannot do any more
ends with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from jaxserve.engine.core import EngineCore, Request, engine_error
from jaxserve.errors import EngineClosedError, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Task(NamedTuple):
    """`run` is called in the engine's thread; `refuse`, with the reason, if it cannot be."""

    run: Callable[[], None]
    refuse: Callable[[EngineError], None]


class EngineThread:
    """Runs an EngineCore until `close`.

    Callers meet the thread in SimpleQueues alone, which an interrupt cannot leave half done: one that comes
    just as a Condition has been entered leaves it locked, and the engine would wait for it for ever.

    Args:
        on_close: called last, in the engine's thread; frees what the engine owns.
        settings: makes the context that the thread works in.
    """

    def __init__(self, core: EngineCore, on_close: Callable[[], None],
                 settings: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext):
        self._core = core
        self._on_close = on_close
        self._settings = settings
        self._inbox: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None: close
        self._process_id = os.getpid()
        self._closing = False
        self._finished = False
        self._fault: BaseException | None = None
        self._end_listeners: queue.SimpleQueue[Callable[[BaseException | None], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    def submit(self, request: Request) -> None:
        """Hands over a request; everything else about it comes through its `on_event`.

        Raises:
            EngineClosedError: as every method but `abort` and `close` does, once the engine has closed or
                its thread has failed, which is its `__cause__` then.
        """
        self._post(_Task(lambda: self._core.add(request), lambda error: self._core.refuse(request, error)))

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs. No error when the engine has closed: then it has ended too."""
        try:
            self._post(_Task(lambda: self._core.abort(request_id), lambda _: None))
        except EngineClosedError:
            pass

    def call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the engine's thread between two steps; returns or raises what it does."""
        if threading.current_thread() is self._thread:
            return function()
        reply: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

        def raises(error: Exception) -> Callable[[], T]:
            def outcome() -> T:
                raise error
            return outcome

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                reply.put(raises(error))
            else:
                reply.put(lambda: result)

        self._post(_Task(run, lambda error: reply.put(raises(error))))
        return reply.get()()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Runs `function`, which must not raise, in the engine's thread after what was posted before. It is not run
        if the thread fails first."""
        self._post(_Task(function, lambda _: None))

    def on_end(self, function: Callable[[BaseException | None], None]) -> None:
        """Calls `function`, once, as the engine's thread ends, with the fault that ended it; at once and in this thread
        if it has ended already. What `function` raises is logged."""
        self._end_listeners.put(function)
        if self._finished:  # it came too late for the thread; if not, the thread has seen it
            self._tell_end()

    def close(self) -> None:
        """Aborts what runs, ends the thread and frees the engine. Twice is fine."""
        self._closing = True
        if self._forked:  # the engine goes on in its own process
            return
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process_id

    def _post(self, task: _Task) -> None:
        if self._forked:  # nobody would answer
            raise EngineClosedError(
                f"this engine lives in process {self._process_id}, and process {os.getpid()} is a fork of it, without "
                "the engine's thread; make the LLM in the child, and start it with multiprocessing's \"spawn\"")
        if self._closing:
            raise self._closed_error()
        self._inbox.put(task)
        if self._finished:  # it came too late for the thread; if not, the thread has seen it
            self._refuse_rest()

    def _closed_error(self) -> EngineError:
        if self._fault is None:
            return EngineClosedError("the engine is closed")
        error = EngineClosedError("the engine's thread has failed, so it takes no more requests; make a new engine")
        error.__cause__ = self._fault
        return error

    def _run(self) -> None:
        try:
            with self._settings():
                while self._turn():
                    pass
        except BaseException as fault:
            logger.exception("the engine's thread has failed")
            self._fault = fault
        self._closing = True
        try:
            self._end(self._fault)
        except BaseException:
            logger.exception("closing the engine has failed")
        self._finished = True
        self._refuse_rest()
        self._tell_end()

    def _turn(self) -> bool:
        """Does what it is asked for, then one step. False when there is no more to come."""
        num_tasks = self._inbox.qsize()
        if not self._core.has_work:
            num_tasks = max(num_tasks, 1)  # wait for one
        for _ in range(num_tasks):
            task = self._inbox.get()
            if task is None:
                return False
            try:
                task.run()
            except BaseException as fault:
                task.refuse(engine_error(fault))
                raise
        if self._core.has_work:
            self._core.step()
        return True

    def _end(self, fault: BaseException | None) -> None:
        try:
            if fault is None:
                self._core.abort_all()
            else:
                self._core.fail_all(fault)
        finally:
            try:
                self._tell_end()
            finally:
                self._on_close()

    def _tell_end(self) -> None:
        while True:
            try:
                function = self._end_listeners.get_nowait()
            except queue.Empty:
                return
            try:
                function(self._fault)
            except Exception:  # no reason to keep the end from the others
                logger.exception("a listener to the engine's end has failed")

    def _refuse_rest(self) -> None:
        while True:
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.refuse(engine_error(self._fault) if self._fault is not None else self._closed_error())
