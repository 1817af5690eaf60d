"""Certificates of a server: checked before the model is loaded, and renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0  # between two looks at the files

Stamp = list[int | None]


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
            # A key with a password would make OpenSSL ask for it on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise ConfigError(f"a TLS file is of no use ({', '.join(map(str, self._files()))}): {error}") from None
        return context

    def stamp(self) -> Stamp:
        """Changes when a file is replaced. Take it before the files are read, so that no change is missed."""
        return [_modified(path) for path in self._files()]

    def _files(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


class CurrentContext(ssl.SSLContext):
    """A context for asyncio, which keeps the one that it is given: each handshake is that of `current`.

    So nothing of what was before lasts, neither certificates of clients' authorities, of which a context can only be
    given more, nor the sessions of clients that these had signed.
    """

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)


async def when_renewed(files: TlsFiles, known: Stamp, use: Callable[[ssl.SSLContext], Awaitable[None]]) -> None:
    """Calls `use` with a new context whenever the files have been replaced by others that fit together, again if it
    fails; until it is cancelled. `known`: the stamp of those that are in use."""
    failed = known
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        stamp = files.stamp()
        if stamp == known:
            continue
        try:
            await use(files.context())
        except Exception as error:  # ours too: the server goes on with what it has
            if stamp != failed:
                failed = stamp
                logger.warning("the TLS files have changed and are not used yet: %s", error)
        else:
            known = stamp
            logger.info("the TLS certificate has been renewed")


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
