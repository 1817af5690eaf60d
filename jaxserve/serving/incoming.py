"""A client's call, whichever face it came through: what its log line and its spans need to know of it."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.serving.request_stream import RequestStream


@dataclass(slots=True, kw_only=True)
class Incoming:
    """One call, from its headers to the end of its answer.

    Attributes:
        method: "POST /v1/completions" or "/jaxserve.v1.Inference/Generate".
        client: address.
        request_id: the client's, or one made for it. None: not known yet (gRPC has it in the message).
        traceparent, tracestate: the W3C trace context that the client sent.
        arrival: time.perf_counter().
        streams: what the engine was asked for on behalf of it; a list of prompts makes several.
        unreadable: why its message is none (gRPC); the call is answered with an error.
    """

    method: str
    client: str
    request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    arrival: float = field(default_factory=time.perf_counter)
    streams: list[RequestStream] = field(default_factory=list)
    unreadable: str | None = None


# Of the task that answers it, and of those that it starts.
CURRENT: ContextVar[Incoming | None] = ContextVar("jaxserve_incoming", default=None)
