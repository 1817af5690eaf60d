"""Runs the application with uvicorn, inside an event loop that is not uvicorn's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE = 75.0  # seconds; longer than the 60 s that load balancers keep idle connections for


class HttpServer:
    """One application on one listening socket.

    Args:
        listener: bound; it is closed in the end.
        certfile, keyfile: for TLS.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, *, certfile: Path | None = None,
                 keyfile: Path | None = None):
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE), timeout_graceful_shutdown=5, ssl_certfile=certfile, ssl_keyfile=keyfile)
        self._server = _Server(config)
        self._listener = listener

    async def run(self) -> None:
        """Serves until `stop`, and then until open answers are complete."""
        try:
            await self._server.serve([self._listener])
        finally:
            self._listener.close()

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are lifecycle.py's."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet, so that probes are refused and do not hang. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
