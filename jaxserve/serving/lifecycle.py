"""A server's life: listen, load, get warm, serve, drain, end.

The ports are open from the beginning, so that probes and clients get an answer while the model is loaded and
compiled: that the server is starting.

SIGTERM or SIGINT: nothing new is taken, what runs may end within `drain_seconds` and is aborted then, and the
process ends with 0. A second signal aborts at once. If the engine fails, the process ends with 1, so that
whoever supervises it starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, EngineError
from jaxserve.llm import LLM
from jaxserve.serving.config import ServeConfig
from jaxserve.serving.http.app import HttpOptions, create_app
from jaxserve.serving.http.server import HttpServer
from jaxserve.serving.listening import bind
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.metrics import ServingMetrics
from jaxserve.serving.service import Service, State
from jaxserve.serving.tls import TlsFiles
from jaxserve.serving.tracing import Tracing

logger = logging.getLogger(__name__)


def serve(model: str, engine_options: dict[str, Any], config: ServeConfig) -> int:
    """Serves a model until a signal, and returns the process' exit code.

    Raises:
        ConfigError: an option is wrong or an address is taken; found before the model is loaded.
        JaxserveError: the model cannot be loaded.
    """
    listener = _listen(config.host, config.port) if config.port else None
    loader = Loader(lambda: LLM(model, **engine_options))
    try:
        code = asyncio.run(run(loader, config.served_model_name or model, config, listener))
        if loader.busy:  # a signal came; the interpreter's own end would wait for what XLA compiles
            logging.shutdown()
            os._exit(code)
        return code
    finally:
        loader.close()
        if listener is not None:
            listener.close()


class Loader:
    """Makes an engine in a thread of its own."""

    def __init__(self, make: Callable[[], LLM]):
        self._make = make
        self._llm: Future[LLM] = Future()
        self._thread = threading.Thread(target=self._run, name="jaxserve-loader", daemon=True)

    def start(self) -> asyncio.Future[LLM]:
        self._llm.set_running_or_notify_cancel()  # who stops waiting does not stop the thread
        self._thread.start()
        return asyncio.wrap_future(self._llm)

    def _run(self) -> None:
        try:
            self._llm.set_result(self._make())
        except BaseException as error:
            self._llm.set_exception(error)

    @property
    def busy(self) -> bool:
        return self._llm.running()

    def close(self) -> None:
        """Closes the engine, if there is one."""
        if self._llm.done() and self._llm.exception() is None:
            self._llm.result().close()


async def run(loader: Loader, model_name: str, config: ServeConfig, listener: socket.socket | None) -> int:
    """Serves an engine until a signal; see `serve`. The caller closes the loader. `listener`: for HTTP."""
    metrics = ServingMetrics(model_name)
    tracing = None if config.otlp_endpoint is None else Tracing.to_endpoint(config.otlp_endpoint, model_name)
    service = Service(model_name=model_name, max_waiting_tokens=config.max_waiting_tokens,
                      observers=(metrics,) if tracing is None else (metrics, tracing))
    try:
        return await _live(service, metrics, loader, config, listener)
    finally:
        service.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def _live(service: Service, metrics: ServingMetrics, loader: Loader, config: ServeConfig,
                listener: socket.socket | None) -> int:
    ended = asyncio.Event()
    service.add_listener(lambda state: ended.set() if state is State.FAILED else None)
    with _signals() as (stop, stop_now):
        async with _faces(service, metrics, config, listener):
            try:
                await _first(_start(service, loader), stop.wait())
            except EngineError:
                logger.exception("the first token could not be made")
                return 1
            await _first(stop.wait(), ended.wait())
            if not ended.is_set():
                # A second signal, or the engine's end, makes it short.
                await _first(service.drain(config.drain_seconds), stop_now.wait(), ended.wait())
                await _first(service.drain(0), ended.wait())
    if service.state is State.FAILED:
        logger.error("the engine has failed; the process ends, so that a supervisor can start it again")
        return 1
    return 0


async def _start(service: Service, loader: Loader) -> None:
    await service.start(await loader.start())


@contextlib.asynccontextmanager
async def _faces(service: Service, metrics: ServingMetrics, config: ServeConfig,
                 listener: socket.socket | None) -> AsyncIterator[None]:
    tls, access_log = None, AccessLog(log_prompts=config.log_prompts) if config.access_log else None
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        tls = TlsFiles(certificate=Path(config.ssl_certfile), key=Path(config.ssl_keyfile),
                       client_ca=None if config.ssl_client_ca is None else Path(config.ssl_client_ca))
    async with contextlib.AsyncExitStack() as stack:
        if listener is not None:
            address = listener.getsockname()[:2]
            app = create_app(service, metrics, HttpOptions(
                api_keys=config.api_key, max_body_bytes=config.max_body_bytes,
                cors_allow_origins=config.cors_allow_origins,
                trust_request_chat_template=config.trust_request_chat_template, chat_page=config.chat_page,
                access_log=access_log))
            await stack.enter_async_context(_http(HttpServer(
                app, listener, tls=tls, idle_seconds=config.idle_seconds, max_connections=config.max_connections)))
            logger.info("HTTP on %s://%s:%d", "https" if tls else "http", *address)
        if config.grpc_port:
            await stack.enter_async_context(_grpc(service, config, tls, access_log))
        yield


@contextlib.asynccontextmanager
async def _http(server: HttpServer) -> AsyncIterator[None]:
    running = asyncio.ensure_future(server.run())
    try:
        yield
    finally:
        server.stop()
        await running


@contextlib.asynccontextmanager
async def _grpc(service: Service, config: ServeConfig, tls: TlsFiles | None,
                access_log: AccessLog | None) -> AsyncIterator[None]:
    from jaxserve.serving.grpc.server import serve

    server = await serve(service, config.host, config.grpc_port, tokens=config.api_key, tls=tls,
                         max_message_bytes=config.grpc_max_message_bytes,
                         keepalive_seconds=config.grpc_keepalive_seconds, with_reflection=config.grpc_reflection,
                         with_channelz=config.grpc_channelz, access_log=access_log)
    logger.info("gRPC on %s:%d", config.host, server.port)
    try:
        yield
    finally:
        await server.stop(1.0)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first signal that asks for an end, and for the next."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    first, second = asyncio.Event(), asyncio.Event()

    def received(number: signal.Signals) -> None:
        logger.info("%s: %s", number.name, "aborting what still runs" if first.is_set() else "draining")
        (second if first.is_set() else first).set()

    for number in numbers:
        loop.add_signal_handler(number, received, number)
    try:
        yield first, second
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first(*awaitables: Any) -> None:
    """Waits until one of them is done, and cancels the others. Raises what that one raises."""
    tasks: Sequence[asyncio.Future[Any]] = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
