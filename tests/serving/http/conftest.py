"""HTTP servers over very small models, on loopback, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import httpx2 as httpx
import openai
import pytest

from jaxserve import LLM
from jaxserve.serving.http.app import HttpOptions, create_app
from jaxserve.serving.http.server import IDLE_SECONDS, MAX_CONNECTIONS, HttpServer
from jaxserve.serving.listening import bind
from jaxserve.serving.metrics import ServingMetrics
from jaxserve.serving.service import Service
from jaxserve.serving.tls import TlsFiles
from tests.llm import tiny

TIMEOUT = 300  # the machine may stand still for a while


class Server:
    """A running server.

    Attributes:
        llm, service, url, port.
        loop: the event loop of the service; touch the service only there, through `call`.
    """

    def __init__(self, llm: LLM, options: HttpOptions, limits: dict, **connections):
        self.llm = llm
        self._stop: asyncio.Event
        started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(
            self._main(options, limits, connections, started)))
        self._thread.start()
        started.result(TIMEOUT)

    async def _main(self, options: HttpOptions, limits: dict, connections: dict, started: Future[None]) -> None:
        try:
            self.loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            metrics = ServingMetrics("tiny")
            self.service = Service(model_name="tiny", observers=(metrics,), **limits)
            await self.service.start(self.llm)
            listener = bind("127.0.0.1", 0)
            self.port = listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            listener.listen()  # connections wait here until uvicorn takes over
            server = HttpServer(create_app(self.service, metrics, options), listener, **connections)
            running = asyncio.ensure_future(server.run())
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)
            raise
        await self._stop.wait()
        await self.service.drain(0)
        server.stop()
        await running
        self.service.close()

    def call(self, coroutine):
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT)

    def wait_until_idle(self) -> None:
        """An answer is out a moment before its request is forgotten."""
        assert self.call(self.service.idle(TIMEOUT))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT)

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "timeout": TIMEOUT, "max_retries": 0}
                                                           | options))

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, **options)


@contextlib.contextmanager
def serving(llm: LLM, limits: dict | None = None, *, tls: TlsFiles | None = None,
            idle_seconds: float = IDLE_SECONDS, max_connections: int = MAX_CONNECTIONS,
            **options) -> Iterator[Server]:
    """`limits`: of the Service. `options`: HttpOptions."""
    server = Server(llm, HttpOptions(**options), limits or {}, tls=tls, idle_seconds=idle_seconds,
                    max_connections=max_connections)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def llm(make_llm) -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm) -> Iterator[Server]:
    """Random weights."""
    with serving(llm) as server:
        yield server


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def http(server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def parrot(make_llm) -> Iterator[Server]:
    """Answers "a" with the rest of the alphabet and </s>."""
    chain = [*b"abcdefghijklmnopqrstuvwxyz", tiny.EOS]
    with make_llm(params=tiny.parrot_tensors(chain)) as llm, serving(llm) as server:
        yield server
