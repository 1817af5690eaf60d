"""Errors as clients of the OpenAI API expect them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.exceptions import HTTPException

from jaxserve.errors import EngineClosedError, QueueFullError, RequestError
from jaxserve.serving.request_stream import DeadlineExceededError, UnavailableError
from jaxserve.serving.service import DuplicateRequestError

logger = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}  # seconds
_MESSAGE_CHARS = 1000  # of a message; it may quote what the client sent


class ApiError(Exception):
    """What a client is told.

    Attributes:
        param: the field that is wrong.
        code: for programs, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _MESSAGE_CHARS:
            message = message[:_MESSAGE_CHARS] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of requests speak of the client's fields. `names`: theirs, of those that the engine calls otherwise."""
    try:
        yield
    except RequestError as error:
        if error.param is None or error.param not in names:
            raise
        name = names[error.param]
        raise RequestError(name + str(error).removeprefix(error.param), name) from None


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. Of those that are nobody's fault but ours, no more than that."""
    match error:
        case ApiError():
            return error
        case DuplicateRequestError():
            return ApiError(409, str(error), param=error.param, code="duplicate_request")
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFullError():
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=RETRY_AFTER)
        case UnavailableError() | EngineClosedError():
            return ApiError(503, str(error), kind="server_error", code="unavailable", headers=RETRY_AFTER)
        case DeadlineExceededError():
            return ApiError(504, str(error), kind="server_error", code="deadline_exceeded")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the engine failed on this request; the server's log has the reason", kind="server_error",
                    code="internal_error")
