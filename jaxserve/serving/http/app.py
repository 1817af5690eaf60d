"""The ASGI application: routes, and what comes before them (keys, request ids, sizes)."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxserve
from jaxserve.errors import JaxserveError
from jaxserve.serving.http.answers import to_json
from jaxserve.serving.http.bodies import Bodies, LastWord, TooLargeError
from jaxserve.serving.http.calls import CALLS, Call
from jaxserve.serving.http.errors import ApiError, api_error
from jaxserve.serving.http.openapi import document
from jaxserve.serving.http.page import PATHS as PAGE_PATHS
from jaxserve.serving.http.page import page_routes
from jaxserve.serving.http.requests import check_model, detokenize_request, tokenize_request
from jaxserve.serving.http.streams import ClientGone, EventStream, while_connected
from jaxserve.serving.incoming import CURRENT, Incoming
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.metrics import CONTENT_TYPE, ServingMetrics
from jaxserve.serving.request_stream import UnavailableError
from jaxserve.serving.service import Service, State

PROBE_PATHS = frozenset({"/health", "/ping"})
_LOGGED_PATH_CHARS = 200
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """See ServeConfig, where they come from. `access_log`: None for none."""

    api_keys: Sequence[str] = field(default=(), repr=False)
    max_body_bytes: int = 16 << 20
    cors_allow_origins: Sequence[str] = ()
    trust_request_chat_template: bool = False
    chat_page: bool = True
    access_log: AccessLog | None = None


def create_app(service: Service, metrics: ServingMetrics, options: HttpOptions | None = None) -> ASGIApp:
    """The application of one service. `metrics` must be one of the service's observers."""
    options = options or HttpOptions()
    endpoints = Endpoints(service, metrics, options)
    errors: Any = dict.fromkeys((ApiError, HTTPException, JaxserveError, ClientGone, Exception), _answer_error)
    page = page_routes() if options.chat_page else []
    app: ASGIApp = Starlette(routes=endpoints.routes() + page, exception_handlers=errors)
    app = _Gate(app, options)
    if options.cors_allow_origins:
        app = CORSMiddleware(app, allow_origins=list(options.cors_allow_origins), allow_methods=["GET", "POST"],
                             allow_headers=["*"], expose_headers=["X-Request-Id"])
    return app


class _Gate:
    """Checks framing and key, gives each request an id, which the answer carries, and logs it."""

    def __init__(self, app: ASGIApp, options: HttpOptions):
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._open_paths = PROBE_PATHS | (PAGE_PATHS if options.chat_page else frozenset())
        self._access_log = options.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):  # a missing one too: what clients send is not repeated unseen
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        call = _incoming(scope, headers, request_id)
        CURRENT.set(call)
        status = 499  # the client has left before there was one

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()),
                                                  (b"x-request-id", request_id.encode())]}
            await send(message)

        app = self._app
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy may have gone by the length, and taken what follows for somebody else's request (RFC 9112, 6.1).
            app = _error_response(ApiError(400, "a request may have a Content-Length or a Transfer-Encoding, not both",
                                           headers={"Connection": "close"}))
        elif self._needs_key(scope["path"]) and not self._known(headers.get(b"authorization", b"")):
            app = _error_response(ApiError(401, "give a valid API key: Authorization: Bearer KEY", param=None,
                                           code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}))
        try:
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server stops, and its patience is over
            if status != 499:
                raise
            await _error_response(api_error(UnavailableError("the server shuts down")))(scope, receive, send_with_id)
        finally:
            if self._access_log is not None:
                polled = scope["path"] in PROBE_PATHS or scope["path"] == "/metrics"
                self._access_log.log(call, status, level=logging.DEBUG if polled else logging.INFO)

    def _needs_key(self, path: str) -> bool:
        return bool(self._keys) and path not in self._open_paths

    def _known(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # All keys are compared, each in constant time.
        matches = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _incoming(scope: Scope, headers: dict[bytes, bytes], request_id: str) -> Incoming:
    def header(name: bytes) -> str | None:
        return headers[name].decode("latin-1") if name in headers else None

    # As it was sent, so that nothing in it is a line break; without the query, which may hold secrets.
    path = scope["raw_path"][:_LOGGED_PATH_CHARS].decode("latin-1")
    return Incoming(method=f"{scope['method']} {path}", client=":".join(map(str, scope["client"] or ())),
                    request_id=request_id, traceparent=header(b"traceparent"), tracestate=header(b"tracestate"))


class Endpoints:
    """What the routes lead to."""

    def __init__(self, service: Service, metrics: ServingMetrics, options: HttpOptions):
        self._service = service
        self._metrics = metrics
        self._options = options
        self._bodies = Bodies(service, options.max_body_bytes, options.cors_allow_origins)

    def routes(self) -> list[Route]:
        def get(path: str, endpoint: Callable[[Request], Awaitable[Any]]) -> Route:
            return Route(path, endpoint, methods=["GET"])

        def post(path: str, endpoint: Callable[[Request], Awaitable[Any]]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return [
            *(post(path, functools.partial(self.generate, make_call)) for path, make_call in CALLS.items()),
            Route("/v1/responses/{response_id:path}", self.stored_response, methods=["GET", "POST", "DELETE"]),
            get("/v1/models", self.models), get("/v1/models/{model:path}", self.model),
            post("/tokenize", self.tokenize), post("/detokenize", self.detokenize),
            get("/health", self.health), Route("/ping", self.health, methods=["GET", "POST"]),
            get("/openapi.json", self.openapi), get("/version", self.version), get("/load", self.load),
            get("/metrics", self.metrics),
        ]

    # -- generation

    async def generate(self, make_call: Callable[..., Call], request: Request) -> Any:
        make = functools.partial(make_call, self._service, request_id=request.state.request_id,
                                 trust_templates=self._options.trust_request_chat_template)
        async with self._bodies.read(request, make) as call:
            # Whatever refuses the request does so here, so that it has a status of its own, streamed or not.
            streams = await while_connected(request.receive, call.start())
        if call.streamed:
            return EventStream(call.events(streams), streams)
        return _json(await while_connected(request.receive, call.whole(streams)))

    async def stored_response(self, request: Request) -> Response:
        raise ApiError(404, "answers are not stored here, so there is none to be had later", param="response_id",
                       code="response_not_found")

    # -- models

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._service.model_name)
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "jaxserve",
                "root": service.model_name, "parent": None, "max_model_len": service.config.max_model_len}

    # -- text

    async def tokenize(self, request: Request) -> Response:
        read = functools.partial(tokenize_request, model=self._service.model_name,
                                 trust_templates=self._options.trust_request_chat_template)
        async with self._bodies.read(request, read) as asked:
            if asked.messages is not None:
                ids = await self._service.tokenize_chat(asked.messages, asked.template)
            else:
                ids = await self._service.tokenize(asked.prompt or "", add_special_tokens=asked.add_special_tokens,
                                                   must_fit=False)
        answer = {"count": len(ids), "max_model_len": self._service.config.max_model_len, "tokens": ids}
        if asked.names:
            answer["token_strs"] = await self._service.token_names(ids)
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        read = functools.partial(detokenize_request, model=self._service.model_name)
        async with self._bodies.read(request, read) as ids:
            return _json({"prompt": await self._service.detokenize(ids)})

    # -- state

    async def health(self, request: Request) -> Response:
        state = self._service.state
        return _json({"status": state.value}, 200 if state is State.READY else 503)

    async def openapi(self, request: Request) -> Response:
        return _json(document())

    async def version(self, request: Request) -> Response:
        return _json({"version": jaxserve.__version__})

    async def load(self, request: Request) -> Response:
        service = self._service
        return _json({"server_load": service.num_active, "waiting": service.num_waiting,
                      "waiting_tokens": service.num_waiting_tokens})

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.render(await self._service.engine_metrics())
        return Response(text, headers={"content-type": CONTENT_TYPE})


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody reads it
    answer = api_error(error)
    return _error_response(answer, LastWord if isinstance(answer, TooLargeError) else Response)


def _error_response(error: ApiError, kind: type[Response] = Response) -> Response:
    return kind(to_json(error.body()), error.status, error.headers, media_type="application/json")


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
