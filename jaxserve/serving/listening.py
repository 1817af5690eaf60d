"""Sockets to listen on."""

from __future__ import annotations

import socket
from typing import Any

# When a client's machine is gone without a word, its connections are given up after about two minutes.
_DEAD_PEER = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _DEAD_PEER.items():
            if hasattr(socket, name):  # not on every platform
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class BoundedListener(socket.socket):
    """A listening socket that closes, at once, connections beyond `max_connections` that are open. They count from
    their first packet, so those within a TLS handshake do too.

    Args:
        listener: becomes this one; it cannot be used afterwards.
    """

    def __init__(self, listener: socket.socket, max_connections: int):
        super().__init__(fileno=listener.detach())
        self._max_connections = max_connections
        self._open: set[_Connection] = set()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError when there is none that may stay."""
        while True:
            accepted, address = super().accept()
            if len(self._open) < self._max_connections:
                return _Connection(accepted, self._open), address
            accepted.close()


class _Connection(socket.socket):
    def __init__(self, accepted: socket.socket, others: set[_Connection]):
        super().__init__(fileno=accepted.detach())
        self._others = others
        others.add(self)

    def close(self) -> None:
        self._others.discard(self)
        super().close()
