"""Servers over tiny models, each in an event loop of its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from jaxserve import LLM
from jaxserve.serving.grpc.server import GrpcServer, serve
from jaxserve.serving.service import Service

T = TypeVar("T")

PATIENCE = 300.0  # seconds; nothing takes that long on a machine of one's own


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result(PATIENCE)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Running:
    """A server and what it serves."""

    def __init__(self, loop: Loop, llm: LLM, service: Service, server: GrpcServer):
        self.loop, self.llm, self.service, self.server = loop, llm, service, server
        self.target = f"127.0.0.1:{server.port}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In the server's event loop."""
        return self.loop.run(coroutine)

    def assert_idle(self) -> None:
        """No request runs, and every page is free again."""
        assert self.run(self.service.idle(PATIENCE))
        metrics = self.llm.metrics()
        assert (metrics["running"], metrics["waiting"]) == (0, 0)
        assert metrics["pages_free"] == metrics["pages_total"]


@contextlib.contextmanager
def running(loop: Loop, llm: LLM, *, started: bool = True, **options: Any) -> Iterator[Running]:
    """`started=False`: the service has no engine yet; `service.start(llm)` gives it one."""

    async def open_server() -> tuple[Service, GrpcServer]:
        service = Service(model_name="tiny")
        if started:
            await service.start(llm)
        return service, await serve(service, "127.0.0.1", 0, **options)

    service, server = loop.run(open_server())
    try:
        yield Running(loop, llm, service, server)
    finally:
        loop.run(server.stop())
        service.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """For what cannot be waited for in another way."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        threading.Event().wait(0.1)
