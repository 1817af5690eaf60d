"""The engine's thread. All faces (blocking, streaming, asyncio, servers) talk to it through an inbox.

A thread and not a process: nothing to pickle, errors keep their traceback, and a notebook's event loop
or interrupt cannot reach into a step. Callbacks run in this thread and only hand over to queues.

Whatever happens to the thread, nobody waits for it in vain: what it was asked for and cannot do any more
ends with an error.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from jaxserve.engine.core import EngineCore, Request, engine_error
from jaxserve.errors import EngineClosedError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Task(NamedTuple):
    """`run` is called in the engine's thread; `refuse`, with the reason, if it cannot be."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], None]


class EngineThread:
    """Runs an EngineCore until `close`.

    Args:
        on_close: called last, in the engine's thread; frees what the engine owns.
    """

    def __init__(self, core: EngineCore, on_close: Callable[[], None]):
        self._core = core
        self._on_close = on_close
        self._inbox: deque[_Task] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._fault: BaseException | None = None
        self._ended: list[Callable[[BaseException | None], None]] = []
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
        self._post(_Task(lambda: self._core.add(request), lambda fault: self._core.refuse(request, fault)))

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
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(_Task(run, lambda fault: future.set_exception(engine_error(fault))))
        return future.result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Runs `function`, which must not raise, in the engine's thread after what was posted before. It is not run
        if the thread fails first."""
        self._post(_Task(function, lambda _: None))

    def on_end(self, function: Callable[[BaseException | None], None]) -> None:
        """Calls `function`, which must not raise, as the engine's thread ends, with the fault that ended it."""
        self._ended.append(function)

    def close(self) -> None:
        """Aborts what runs, ends the thread and frees the engine. Twice is fine."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, task: _Task) -> None:
        with self._wake:
            if self._fault is not None:
                raise EngineClosedError("the engine's thread has failed, so it takes no more requests; "
                                        "make a new engine") from self._fault
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._inbox.append(task)
            self._wake.notify()

    def _run(self) -> None:
        fault = None
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("the engine's thread has failed")
            fault = error
        try:
            self._end(fault)
        except BaseException:
            logger.exception("closing the engine has failed")

    def _turn(self) -> bool:
        """Does what it is asked for, then one step. False when there is no more to come."""
        with self._wake:
            while not (self._inbox or self._closing or self._core.has_work):
                self._wake.wait()
            closing, num_tasks = self._closing, len(self._inbox)
        for _ in range(num_tasks):
            task = self._inbox.popleft()
            try:
                task.run()
            except BaseException as error:
                task.refuse(error)
                raise
        if closing:
            return False
        if self._core.has_work:
            self._core.step()
        return True

    def _end(self, fault: BaseException | None) -> None:
        with self._wake:
            self._closing, self._fault = True, fault
            tasks, self._inbox = self._inbox, deque()
        # Only a fault leaves tasks behind: `close` comes after all that was posted.
        try:
            if fault is None:
                self._core.abort_all()
            else:
                for task in tasks:
                    task.refuse(fault)
                self._core.fail_all(fault)
        finally:
            for function in self._ended:
                function(fault)
            self._on_close()
