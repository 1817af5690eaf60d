"""What every call has in common: errors become statuses with google.rpc details, and the server knows when all
calls have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import EngineClosedError, JaxserveError, QueueFullError, RequestError
from jaxserve.serving.incoming import CURRENT
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.request_stream import DEADLINE_SLACK_SECONDS, DeadlineExceededError, UnavailableError
from jaxserve.serving.service import DuplicateRequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000  # statuses travel in headers, and clients bound those to some KiB
MAX_REQUEST_ID_CHARS = 128
RETRY_SECONDS = 1


class UnimplementedError(JaxserveError):
    """A field or method of the protocol that this server does not serve."""


class Calls:
    """The calls that are being answered.

    Args:
        field: where a request's field of this name stands in the protocol's messages.
    """

    def __init__(self, field: Callable[[str], str] = str, access_log: AccessLog | None = None):
        self._field = field
        self._access_log = access_log
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def answer(self, context: grpc.aio.ServicerContext, *, polled: bool = False) -> AsyncIterator[None]:
        """Wraps the body of a call. What it raises ends the call with a status. `polled`: by probes and the like, again
        and again, so that its line is only for debugging."""
        self._num_open += 1
        self._idle.clear()
        code = grpc.StatusCode.OK
        try:
            incoming = CURRENT.get()
            if incoming is not None and incoming.unreadable is not None:
                raise RequestError(f"the message cannot be read: {incoming.unreadable}")
            yield
        except asyncio.CancelledError:
            left = context.time_remaining()
            late = left is not None and left < DEADLINE_SLACK_SECONDS
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("a call has failed")
            status = rpc_status.to_status(error_status(error, self._field))
            code = status.code
            await context.abort(code, status.details, status.trailing_metadata)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()
            log_call(self._access_log, context, code, logging.DEBUG if polled else logging.INFO)

    async def idle(self) -> None:
        """Waits until no call is open."""
        await self._idle.wait()


def log_call(access_log: AccessLog | None, context: grpc.aio.ServicerContext, code: grpc.StatusCode,
             level: int = logging.INFO) -> None:
    """Writes the line of the call that this task answers."""
    call = CURRENT.get()
    if access_log is None or call is None:
        return
    call.client = context.peer()
    if call.streams:
        call.request_id = call.streams[0].request_id
    access_log.log(call, code.name, level=level)


def error_status(error: Exception, field: Callable[[str], str] = str) -> status_pb2.Status:
    """The status that tells a client of `error`."""
    message = str(error)
    details: list[Message] = []
    if isinstance(error, RequestError):
        code = code_pb2.INVALID_ARGUMENT
        if isinstance(error, DuplicateRequestError):
            code = code_pb2.ALREADY_EXISTS
        name = "" if error.param is None else field(error.param)
        details.append(error_details_pb2.BadRequest(field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=name, description=_shortened(message))]))
    elif isinstance(error, QueueFullError):
        code = code_pb2.RESOURCE_EXHAUSTED
        details.append(_retry_info())
    elif isinstance(error, UnavailableError | EngineClosedError):
        code = code_pb2.UNAVAILABLE
        details.append(_retry_info())
    elif isinstance(error, DeadlineExceededError):
        code = code_pb2.DEADLINE_EXCEEDED
    elif isinstance(error, UnimplementedError):
        code = code_pb2.UNIMPLEMENTED
    elif isinstance(error, JaxserveError):
        code = code_pb2.INTERNAL
    else:
        code, message = code_pb2.INTERNAL, "internal error; see the server's log"
    return status_pb2.Status(code=code, message=_shortened(message), details=[_packed(detail) for detail in details])


def check_request_id(request_id: str) -> str | None:
    """The id a client gave; None if it gave none. Raises RequestError for one that is no fit for logs."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise RequestError(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters of printable ASCII, got "
                           f"{len(request_id)} characters", "request_id")
    return request_id or None


def _retry_info() -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS))


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
