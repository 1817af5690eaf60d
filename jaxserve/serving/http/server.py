"""Runs the application with uvicorn, inside an event loop that is not uvicorn's, and bounds what connections cost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.serving.http.answers import to_json
from jaxserve.serving.http.errors import ApiError
from jaxserve.serving.listening import BoundedListener
from jaxserve.serving.tls import CurrentContext, TlsFiles, when_renewed

IDLE_SECONDS = 75.0
MAX_CONNECTIONS = 4096
PATIENCE_SECONDS = 5  # at the end, with answers that are still open and bodies that do not come
MAX_PIPELINED_BYTES = 1 << 16  # of requests that come before an answer; what is more waits in the socket


class HttpServer:
    """One application on one listening socket.

    Args:
        listener: bound; it is used up, and closed in the end.
        tls: its certificate is read again when it has been renewed.
        idle_seconds: a connection without a request, or in the middle of a request's head, is closed after so long.
        max_connections: more are closed at once. Those within their TLS handshake, which may take a minute, count.

    Raises:
        ConfigError: a file of `tls` is of no use.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, *, tls: TlsFiles | None = None,
                 idle_seconds: float = IDLE_SECONDS, max_connections: int = MAX_CONNECTIONS):
        protocol: Any = functools.partial(_Protocol, idle_seconds=idle_seconds)
        self._tls = tls
        context = None
        if tls is not None:
            self._stamp = tls.stamp()
            self._context = context = CurrentContext(ssl.PROTOCOL_TLS_SERVER)
            context.current = tls.context()
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=PATIENCE_SECONDS,
            ssl_context_factory=None if context is None else lambda *_: context)
        self._server = _Server(config)
        self._listener = BoundedListener(listener, max_connections)

    async def run(self) -> None:
        """Serves until `stop`, and then until open answers are complete."""
        renewing = asyncio.ensure_future(self._renewing())
        try:
            await self._server.serve([self._listener])
        finally:
            renewing.cancel()
            self._listener.close()

    def stop(self) -> None:
        self._server.should_exit = True

    async def _renewing(self) -> None:
        async def use(context: ssl.SSLContext) -> None:
            self._context.current = context

        if self._tls is not None:
            await when_renewed(self._tls, self._stamp, use)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are lifecycle.py's."""
        yield


class _Protocol(H11Protocol):
    """uvicorn's protocol has a timeout between two requests, but none before the first nor within a request's head."""

    def __init__(self, *args: Any, idle_seconds: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._idle_seconds = idle_seconds
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_idling()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_idling()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        # uvicorn stops reading at a request that came before the answer to the one before, and would not see the client
        # go then.
        if (self.flow.read_paused and self.conn.their_state is h11.DONE
                and len(self.conn.trailing_data[0]) <= MAX_PIPELINED_BYTES):
            self.flow.resume_reading()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_idling()

    def _should_upgrade(self) -> bool:
        """Never, and uvicorn would say twice a request that something is to be installed: Java's client offers HTTP/2
        each time."""
        return False

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP: in the API's form, if no answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(ApiError(400, msg).body())
            headers = [("content-type", "application/json"), ("content-length", str(len(body))),
                       ("connection", "close")]
            for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body),
                          h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._begin_idling()
        super().on_response_complete()  # may begin with a request that came meanwhile
        self._unset_keepalive_if_required()  # ours goes on while a head comes in bit by bit

    def _begin_idling(self) -> None:
        self._end_idling()
        self._idle_timer = self.loop.call_later(self._idle_seconds, self.transport.close)

    def _end_idling(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
