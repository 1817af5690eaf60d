"""The engine's thread. All faces (blocking, streaming, asyncio, servers) talk to it through an inbox.

A thread and not a process: nothing to pickle, errors keep their traceback, and a notebook's event loop
or interrupt cannot reach into a step. Callbacks run in this thread and only hand over to queues.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from jaxserve.engine.core import EngineCore, Request
from jaxserve.errors import EngineClosedError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Runs an EngineCore until `close`.

    Args:
        on_close: called last, in the engine's thread; frees what the engine owns.
    """

    def __init__(self, core: EngineCore, on_close: Callable[[], None]):
        self._core = core
        self._on_close = on_close
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    def submit(self, request: Request) -> None:
        """Hands over a request; everything else about it comes through its `on_event`."""
        self._post(lambda: self._core.add(request))

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs. No error when the engine has closed: then it has ended too."""
        try:
            self._post(lambda: self._core.abort(request_id))
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
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def close(self) -> None:
        """Aborts what runs, ends the thread and frees the engine. Twice is fine."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._inbox.append(action)
            self._wake.notify()

    def _run(self) -> None:
        core = self._core
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self._closing or core.has_work):
                        self._wake.wait()
                    actions, self._inbox = self._inbox, deque()
                    closing = self._closing
                for action in actions:
                    action()
                if closing:
                    return
                if core.has_work:
                    core.step()
        except BaseException:
            logger.exception("the engine's thread failed")
            raise
        finally:
            self._end()

    def _end(self) -> None:
        with self._wake:
            self._closing = True
            actions, self._inbox = self._inbox, deque()
        for action in actions:  # what came in after the last look: calls get answers, requests are aborted below
            action()
        self._core.abort_all()
        self._on_close()
