"""Request bodies: what is taken as one, how much of it at a time, and where it is read as JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import QueueFullError
from jaxserve.serving.http.errors import ApiError
from jaxserve.serving.http.fields import parse_json
from jaxserve.serving.http.streams import ClientGone
from jaxserve.serving.service import Service

T = TypeVar("T")

BODY_TIMEOUT = 60.0  # seconds for a body to arrive
SMALL_BYTES = 1 << 16  # these are not counted, and read where they arrive: that takes less than a millisecond
LARGE_AT_ONCE = 4  # so many of the largest size are held at a time, or more of smaller ones
DISCARD_BYTES = 8 << 20
LINGER_SECONDS = 5.0


class TooLargeError(ApiError):
    """413. Its answer is a `LastWord`, because the client may still be sending."""

    def __init__(self, limit: int):
        super().__init__(413, f"the body is larger than the {limit} bytes that this server takes",
                         code="body_too_large", headers={"Connection": "close"})


class Bodies:
    """Reads the bodies of one application.

    Args:
        max_bytes: of one.
        allowed_origins: web origins whose pages may call; "*" is every one.
    """

    def __init__(self, service: Service, max_bytes: int, allowed_origins: Sequence[str]):
        self._service = service
        self._max_bytes = max_bytes
        self._allowed_origins = allowed_origins
        self._held = 0  # bytes of the bodies that are not small

    @contextlib.asynccontextmanager
    async def read(self, request: Request, function: Callable[[Any], T]) -> AsyncIterator[T]:
        """`function` of the body's JSON. While it is worked with, the body counts as held.

        Raises:
            ApiError: 413, 415, 408, 400.
            QueueFullError: too much is held.
            ClientGone.
        """
        headers = request.headers
        self._check_type(headers)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise TooLargeError(self._max_bytes)
        body, held = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT):
                    more = True
                    while more:
                        message = await request.receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGone
                        body += message.get("body", b"")
                        more = message.get("more_body", False)
                        if len(body) > self._max_bytes:
                            raise TooLargeError(self._max_bytes)
                        if len(body) > SMALL_BYTES:
                            self._hold(len(body) - held)
                            held = len(body)
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:g} s",
                               headers={"Connection": "close"}) from None
            yield await self._work(body, function)
        finally:
            self._held -= held

    async def _work(self, body: bytearray, function: Callable[[Any], T]) -> T:
        if len(body) <= SMALL_BYTES:
            return function(parse_json(body))
        return await self._service.run_text(lambda: function(parse_json(body)), len(body))

    def _hold(self, more: int) -> None:
        limit = LARGE_AT_ONCE * self._max_bytes
        if self._held + more > limit:
            raise QueueFullError(f"requests with {self._held} bytes are being read, the limit is {limit}; try again "
                                 "later")
        self._held += more

    def _check_type(self, headers: Headers) -> None:
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ApiError(415, f"the body is sent as Content-Encoding {encoding[:50]!r}, which is not decoded here; "
                                "send it as it is", code="unsupported_content_encoding",
                           headers={"Accept-Encoding": "identity"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser asks before a page of another origin may send JSON (and the answer is no, unless that origin is
        # allowed), but not before it sends what a form could. Programs that are no browsers may leave the type out.
        if kind != "application/json" and not self._is_ours(headers):
            raise ApiError(415, f"web pages must send Content-Type: application/json, got {kind[:50]!r}",
                           code="unsupported_media_type")

    def _is_ours(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        own = [f"{scheme}://{headers.get('host')}" for scheme in ("http", "https")]
        return origin is None or origin in (*own, *self._allowed_origins) or "*" in self._allowed_origins


class LastWord(Response):
    """An answer to a client that may still be sending. It goes out at once; but closing a connection on which
    something arrives resets it, and the answer may be lost with it. So the client has a little time to read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while discarded < DISCARD_BYTES:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    if not message.get("more_body", False):  # the body's end, or the client's
                        break
        await send({"type": "http.response.body", "body": b""})
