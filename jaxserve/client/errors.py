"""From gRPC statuses back to the exceptions that the offline engine raises."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxserve.errors import JaxserveError, QueueFullError, RequestError

_OF_THE_REQUEST = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNIMPLEMENTED)
_MESSAGE_PARTS = ("sampling.", "conversation.")  # of jaxserve.v1's requests


class ServerError(JaxserveError, RuntimeError):
    """The server failed, refused, or could not be reached.

    Attributes:
        code: the gRPC status, such as "UNAVAILABLE" or "UNAUTHENTICATED".
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class ServerTimeoutError(ServerError, TimeoutError):
    """The answer did not come within the client's timeout. The server has ended the request."""


def client_error(error: Any) -> Exception:
    """`error`: a grpc.RpcError that is a call, or a grpc.aio.AioRpcError.

    Returns:
        RequestError (with `param`), QueueFullError, ServerTimeoutError or ServerError.
    """
    code, message = error.code(), error.details() or ""
    if code in _OF_THE_REQUEST:
        return RequestError(message, _param(error))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # The queue says when to come again; gRPC itself, of a message that is too large, does not.
        if _detail(error, error_details_pb2.RetryInfo) is not None:
            return QueueFullError(message)
        return RequestError(f"the message is too large: {message}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerTimeoutError(f"no answer within the timeout: {message}", code.name)
    return ServerError(f"{code.name}: {message}", code.name)


def _param(error: Any) -> str | None:
    bad_request = _detail(error, error_details_pb2.BadRequest)
    if bad_request is None or not bad_request.field_violations:
        return None
    field = bad_request.field_violations[0].field
    for part in _MESSAGE_PARTS:
        field = field.removeprefix(part)
    return field.removesuffix("_json") or None


def _detail(error: Any, kind: Any) -> Any:
    status = rpc_status.from_call(error)
    for packed in () if status is None else status.details:
        if packed.Is(kind.DESCRIPTOR):
            detail = kind()
            packed.Unpack(detail)
            return detail
    return None
