"""Sockets to listen on."""

from __future__ import annotations

import socket

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
