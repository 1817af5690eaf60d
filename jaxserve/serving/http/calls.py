"""From the body of a request that generates to its answer, whoever brings it: a socket or a batch file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from jaxserve.serving.http.answers import Json
from jaxserve.serving.http.generation import Chat, Completions
from jaxserve.serving.http.requests import chat_request, completion_request
from jaxserve.serving.http.responses import Responses
from jaxserve.serving.http.responses_request import responses_request
from jaxserve.serving.request_stream import RequestStream
from jaxserve.serving.service import Service


class Call(Protocol):
    """A checked request. `start` it, and give what that returned to `whole` or `events`.

    Attributes:
        streamed: the client wants `events`.
    """

    streamed: bool

    async def start(self) -> list[RequestStream]:
        """Raises RequestError, QueueFullError, ...: then nothing runs."""
        ...

    async def whole(self, streams: Sequence[RequestStream]) -> Json:
        """The answer."""
        ...

    def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Errors are events too."""
        ...


def completions(service: Service, body: Any, request_id: str, *, trust_templates: bool) -> Call:
    return Completions(service, completion_request(body, service.model_name), f"cmpl-{request_id}")


def chat(service: Service, body: Any, request_id: str, *, trust_templates: bool) -> Call:
    request = chat_request(body, service.model_name, trust_templates=trust_templates)
    return Chat(service, request, f"chatcmpl-{request_id}")


def responses(service: Service, body: Any, request_id: str, *, trust_templates: bool) -> Call:
    return Responses(service, responses_request(body, service.model_name), f"resp_{request_id}")


# Each raises ApiError or RequestError if the body is wrong.
CALLS: dict[str, Callable[..., Call]] = {
    "/v1/completions": completions, "/v1/chat/completions": chat, "/v1/responses": responses,
}
