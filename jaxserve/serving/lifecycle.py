"""A server's life: listen, get warm, serve, drain, end.

SIGTERM or SIGINT: nothing new is taken, what runs may end within `drain_seconds` and is aborted then, and the
process ends with 0. A second signal aborts at once. If the engine fails, the process ends with 1, so that
whoever supervises it starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.llm import LLM
from jaxserve.serving.config import ServeConfig
from jaxserve.serving.http.app import HttpOptions, create_app
from jaxserve.serving.http.server import HttpServer, bind
from jaxserve.serving.metrics import ServingMetrics
from jaxserve.serving.service import Service, ServiceLimits, State

logger = logging.getLogger(__name__)


def serve(model: str, engine_options: dict[str, Any], config: ServeConfig) -> int:
    """Serves a model until a signal, and returns the process' exit code.

    Raises:
        ConfigError: an option is wrong or an address is taken; found before the model is loaded.
    """
    listener = _listen(config.host, config.port) if config.port else None
    if config.grpc_port:
        _listen(config.host, config.grpc_port).close()  # only to find out
    try:
        with LLM(model, **engine_options) as llm:
            return asyncio.run(run(llm, config.served_model_name or model, config, listener))
    finally:
        if listener is not None:
            listener.close()


async def run(llm: LLM, model_name: str, config: ServeConfig, listener: socket.socket | None) -> int:
    """Serves an engine until a signal; see `serve`. `listener`: for HTTP."""
    metrics = ServingMetrics(model_name, llm.config)
    limits = ServiceLimits(max_waiting_tokens=config.max_waiting_tokens)
    service = Service(llm, model_name=model_name, limits=limits, observer=metrics)
    signals: asyncio.Queue[str] = asyncio.Queue()
    ended: asyncio.Event = asyncio.Event()
    service.add_listener(lambda state: ended.set() if state is State.FAILED else None)
    with _signals(signals):
        async with _faces(service, metrics, config, listener):
            try:
                await service.start()
            except JaxserveError:
                logger.exception("the first token could not be made")
                return 1
            await _first(signals.get(), ended.wait())
            if not ended.is_set():
                # A second signal, or the engine's end, makes it short.
                await _first(service.drain(config.drain_seconds), signals.get(), ended.wait())
                await _first(service.drain(0), ended.wait())
    service.close()
    if service.state is State.FAILED:
        logger.error("the engine has failed; the process ends, so that a supervisor can start it again")
        return 1
    return 0


@contextlib.asynccontextmanager
async def _faces(service: Service, metrics: ServingMetrics, config: ServeConfig,
                 listener: socket.socket | None) -> AsyncIterator[None]:
    tls = None
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        tls = (Path(config.ssl_certfile), Path(config.ssl_keyfile))
    async with contextlib.AsyncExitStack() as stack:
        if listener is not None:
            app = create_app(service, metrics, HttpOptions(
                api_keys=config.api_key, max_body_bytes=config.max_body_bytes,
                cors_allow_origins=config.cors_allow_origins,
                trust_request_chat_template=config.trust_request_chat_template))
            await stack.enter_async_context(_http(HttpServer(
                app, listener, certfile=tls and tls[0], keyfile=tls and tls[1])))
            logger.info("HTTP on %s://%s:%d", "https" if tls else "http", *listener.getsockname()[:2])
        if config.grpc_port:
            await stack.enter_async_context(_grpc(service, config, tls))
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
async def _grpc(service: Service, config: ServeConfig, tls: tuple[Path, Path] | None) -> AsyncIterator[None]:
    from jaxserve.serving.grpc.server import TlsFiles, serve

    server = await serve(service, config.host, config.grpc_port, tokens=config.api_key,
                         tls=None if tls is None else TlsFiles(certificate=tls[0], key=tls[1]))
    logger.info("gRPC on %s:%d", config.host, server.port)
    try:
        yield
    finally:
        await server.stop(1.0)


@contextlib.contextmanager
def _signals(queue: asyncio.Queue[str]) -> Any:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def received(number: signal.Signals) -> None:
        logger.info("%s: draining", number.name)
        queue.put_nowait(number.name)

    for number in numbers:
        loop.add_signal_handler(number, received, number)
    try:
        yield
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
