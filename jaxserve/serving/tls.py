"""Certificates of a server: checked before the model is loaded, and renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0  # between two looks at the files


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: the server's certificate chain.
        key: its private key, not encrypted.
        client_ca: certificates that clients' certificates must be signed by. None: clients need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """What OpenSSL makes of the files. Raises ConfigError if that is nothing."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.load_into(context)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise ConfigError(f"a TLS file is of no use ({', '.join(map(str, self._files()))}): {error}") from None
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Gives a context the certificate as it is now; handshakes from here on show it. Raises OSError."""
        # A key with a password would make OpenSSL ask for it on the terminal.
        context.load_cert_chain(self.certificate, self.key, password=lambda: "")

    def stamp(self) -> list[int]:
        """Changes when a file is replaced. Raises OSError."""
        return [path.stat().st_mtime_ns for path in self._files()]

    def _files(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


async def when_renewed(files: TlsFiles, use: Callable[[], Awaitable[None]]) -> None:
    """Calls `use` whenever the files have been replaced by others that fit together; until it is cancelled."""
    known = files.stamp()
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        try:
            stamp = files.stamp()
            if stamp == known:
                continue
            files.context()
        except (OSError, ConfigError):  # in the middle of being replaced: one file is new, the other is old
            continue
        known = stamp
        await use()
        logger.info("the TLS certificate has been renewed")
