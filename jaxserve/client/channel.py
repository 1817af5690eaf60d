"""Where the server is and how it is reached: common to both clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxserve.errors import ConfigError

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"
_HOST = re.compile(r"[\w.-]+|\[[\w:.%]+\]")  # and nothing more: no port, no scheme
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20  # as the server's
KEEPALIVE_SECONDS = 30  # a server that has vanished is noticed even while no answer is due


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """PEM files for an encrypted connection.

    Attributes:
        ca: what the server's certificate must be signed by. None: the authorities that gRPC knows.
        certificate, key: of this client, for servers that ask for one.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError: a file cannot be read, or there is one of certificate and key."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("certificate and key go together")
        try:
            ca, key, certificate = (None if path is None else Path(path).read_bytes()
                                    for path in (self.ca, self.key, self.certificate))
        except OSError as error:
            raise ConfigError(f"a TLS file cannot be read: {error}") from None
        return grpc.ssl_channel_credentials(ca, key, certificate)


def full_target(target: str) -> str:
    """`target` with our port if it has none: gRPC would take that of https. Raises ConfigError if it is no target."""
    if not isinstance(target, str) or not target.strip():
        raise ConfigError(f"target must be a host and a port such as {DEFAULT_TARGET!r}, got {target!r}")
    if target.startswith(("http://", "https://")):
        raise ConfigError(f"target must be a host and a port such as {DEFAULT_TARGET!r} and no URL, got {target!r}"
                          f"{'; for an encrypted connection give tls' if target.startswith('https') else ''}")
    return f"{target}:{DEFAULT_PORT}" if _HOST.fullmatch(target) else target


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ]


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)
