"""The gRPC server: both protocols, health, reflection, keys and certificates on one port."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxserve.errors import ConfigError
from jaxserve.serving.grpc import inference, vllm_engine
from jaxserve.serving.grpc.calls import log_call
from jaxserve.serving.grpc.inference import InferenceServicer
from jaxserve.serving.grpc.vllm_engine import VllmEngineServicer
from jaxserve.serving.incoming import CURRENT, Incoming
from jaxserve.serving.listening import bind
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.protos.pool import POOL
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.protos.vllm import vllm_engine_pb2_grpc
from jaxserve.serving.service import Service, State
from jaxserve.serving.tls import TlsFiles, when_renewed

# A prompt of a million ids takes 4 MB, log-probabilities of a long prompt some more. gRPC's own limit of 4 MiB is
# too small for them, and no limit lets one client take all memory.
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MIN_PING_INTERVAL_SECONDS = 5  # clients that ping more often than this are sent away
KEEPALIVE_SECONDS = 60.0
KEEPALIVE_TIMEOUT_SECONDS = 20
_FOREVER = 1e9
REPLACED_SECONDS = 3600.0  # for which calls go on that began before the certificate was renewed

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_PROBES = (f"/{_HEALTH}/", vllm_engine.HEALTH_METHOD)  # they carry no token
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
_SERVICES = (vllm_engine.SERVICE_NAME, inference.SERVICE_NAME)
_OURS = tuple(f"/{service}/" for service in _SERVICES)
_Servicer = InferenceServicer | VllmEngineServicer


class GrpcServer:
    """A running server; `serve` makes it.

    Attributes:
        port: where it listens.
    """

    def __init__(self, make: Callable[[], tuple[grpc.aio.Server, int]], servicers: Sequence[_Servicer],
                 health_status: _HealthStatus, tls: TlsFiles | None):
        self._make = make
        self._servicers = servicers
        self._health_status = health_status
        self._tls = tls
        self._stamp = None if tls is None else tls.stamp()
        self._server, self.port = make()
        self._retiring: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()
        if self._tls is not None and self._stamp is not None:
            self._renewing = asyncio.ensure_future(when_renewed(self._tls, self._stamp, self._replace))

    async def _replace(self, context: ssl.SSLContext) -> None:
        """Another server takes over the port, with the certificate as it is now; the calls of the old one go on.

        grpc's own way, dynamic_ssl_server_credentials, frees the old certificate under handshakes that still use it
        (grpc issue 36693), which ends the process.
        """
        new, _ = self._make()
        try:
            await new.start()
        except BaseException:
            await new.stop(0)
            raise
        old, self._server = self._server, new
        retiring = asyncio.ensure_future(self._retire(old))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    async def _retire(self, server: grpc.aio.Server) -> None:
        """It takes no more calls; those that run may go on for an hour, or until there is a hurry."""
        stopping, hurry = asyncio.ensure_future(server.stop(_FOREVER)), asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({stopping, hurry}, timeout=REPLACED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        # Never two stops at a time: the first to end frees the server under the other, which ends the process.
        stopping.cancel()
        hurry.cancel()
        await asyncio.wait({stopping, hurry})
        await server.stop(0)

    async def stop(self, grace: float = 0.0) -> None:
        """Waits for the calls that run, for `grace` seconds at most, and ends all. The service took no more before.

        Health watches and reflection streams do not end by themselves and are not waited for.
        """
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        await self._health_status.close()
        idle = asyncio.gather(*(servicer.calls.idle() for servicer in self._servicers))
        await asyncio.wait({idle}, timeout=grace)
        idle.cancel()
        self._hurry.set()
        await asyncio.gather(self._server.stop(0), *self._retiring)


async def serve(service: Service, host: str, port: int, *, tls: TlsFiles | None = None, tokens: Sequence[str] = (),
                max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, keepalive_seconds: float = KEEPALIVE_SECONDS,
                with_reflection: bool = True, with_channelz: bool = False,
                access_log: AccessLog | None = None) -> GrpcServer:
    """Starts a server in the running event loop, the one of the service. It says NOT_SERVING, and refuses
    requests, until the service is ready.

    Args:
        port: 0 chooses one; see GrpcServer.port.
        tls: for new connections the files are read again when they have been renewed.
        tokens: of these, a call must carry one as `authorization: Bearer TOKEN` (health checks need none). Empty:
            everybody may call.
        max_message_bytes: largest message that is taken, and sent; larger ones end with RESOURCE_EXHAUSTED.
        keepalive_seconds: how often a silent connection is asked whether it is still there.
        with_reflection: tell clients the protocols.
        with_channelz: serve grpc's own debugging data.

    Raises:
        ConfigError: the address cannot be listened on, a file of `tls` is of no use, or grpcio-channelz is missing.
    """
    _check_free(host, port)
    if tls is not None:
        tls.context()  # grpc itself would only write to its log
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    interceptors: list[grpc.aio.ServerInterceptor] = [_Incoming()]
    if tokens:
        interceptors.append(_BearerTokens(tokens, access_log))
    servicers = InferenceServicer(service, access_log), VllmEngineServicer(service, access_log)
    health_servicer = health.HealthServicer()
    pool = _reflection_pool() if with_reflection else None
    channelz = _channelz() if with_channelz else None

    def make() -> tuple[grpc.aio.Server, int]:
        nonlocal address
        server = grpc.aio.server(interceptors=interceptors, options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # For the moment in which a server takes over from one with an old certificate.
            ("grpc.so_reuseport", 0 if tls is None else 1),
            ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
            # Else clients that ping during a long silent prefill are sent away for "too many pings".
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_SECONDS * 1000),
        ])
        inference_pb2_grpc.add_InferenceServicer_to_server(servicers[0], server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicers[1], server)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if pool is not None:
            reflection.enable_server_reflection((*_SERVICES, _HEALTH, _REFLECTION), server, pool=pool)
        if channelz is not None:
            channelz.add_channelz_servicer(server)
        try:
            bound = (server.add_insecure_port(address) if tls is None else
                     server.add_secure_port(address, _credentials(tls)))
        except RuntimeError as error:
            raise ConfigError(f"gRPC cannot listen on {address}: {error}") from None
        address = f"{address.rpartition(':')[0]}:{bound}"
        return server, bound

    health_status = _HealthStatus(health_servicer)
    server = GrpcServer(make, servicers, health_status, tls)
    await health_status.follow(service)
    await server.start()
    return server


class _HealthStatus:
    """Makes grpc.health.v1 say what the service's state is: SERVING only when it is ready."""

    def __init__(self, servicer: health.HealthServicer):
        self._servicer = servicer
        self._changes: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()

    async def follow(self, service: Service) -> None:
        await self._set(service.state)  # before the first client can ask
        service.add_listener(self._on_state)

    def _on_state(self, state: State) -> None:
        task = asyncio.ensure_future(self._set(state))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _set(self, state: State) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(
            "SERVING" if state is State.READY else "NOT_SERVING")
        async with self._order:  # the lock is fair, so changes arrive in their order
            for name in ("", *_SERVICES):
                await self._servicer.set(name, status)

    async def close(self) -> None:
        """NOT_SERVING for good."""
        async with self._order:
            await self._servicer.enter_graceful_shutdown()


class _BearerTokens(grpc.aio.ServerInterceptor):
    """Lets calls pass that carry one of the tokens."""

    def __init__(self, tokens: Sequence[str], access_log: AccessLog | None):
        self._tokens = [token.encode() for token in tokens]

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            log_call(access_log, context, grpc.StatusCode.UNAUTHENTICATED)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bearer token is missing or wrong; it is sent as "
                                "metadata, authorization: Bearer TOKEN")

        # Whatever the method's own form: a stream's messages are only taken when they are asked for, so nobody without
        # a token sends megabytes.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(_PROBES) or self._allows(dict(details.invocation_metadata)):
            return await continuation(details)
        return self._refuse

    def _allows(self, metadata: dict[str, str | bytes]) -> bool:
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        # Every token is compared in full, so the time says nothing about how much of one was right.
        equal = [hmac.compare_digest(token.strip().encode(), allowed) for allowed in self._tokens]
        return scheme.lower() == "bearer" and any(equal)


class _Incoming(grpc.aio.ServerInterceptor):
    """Makes known whose call it is, for logs and traces, and whether it can be read at all."""

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        metadata = dict(details.invocation_metadata)
        CURRENT.set(Incoming(method=details.method, client="", traceparent=_text(metadata.get("traceparent")),
                             tracestate=_text(metadata.get("tracestate"))))
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None or not details.method.startswith(_OURS):
            return handler
        return handler._replace(request_deserializer=partial(_read_message, handler.request_deserializer))


def _read_message(read: Callable[[bytes], Message], content: bytes) -> Message:
    """A call's message, read in the task that answers it. Of bytes that are none the call learns through `CURRENT`;
    what is raised here would end it as UNKNOWN, with a traceback in the log for every one of them."""
    try:
        return read(content)
    except DecodeError as error:
        incoming = CURRENT.get()
        assert incoming is not None
        incoming.unreadable = str(error)
        return read(b"")


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None


def _check_free(host: str, port: int) -> None:
    """grpc shares a port with another server, so it would not say that it is taken. Raises ConfigError."""
    try:
        bind(host, port).close()
    except OSError as error:
        raise ConfigError(f"gRPC cannot listen on {host}:{port}: {error}") from None


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    return grpc.ssl_server_credentials([(tls.key.read_bytes(), tls.certificate.read_bytes())],
                                       root_certificates=client_ca, require_client_auth=client_ca is not None)


def _channelz() -> Any:
    try:
        from grpc_channelz.v1 import channelz
    except ImportError:
        raise ConfigError("grpc_channelz needs grpcio-channelz: pip install grpcio-channelz") from None
    return channelz


def _reflection_pool() -> DescriptorPool:
    """Our protocols' own pool, with the descriptors of the other services put in."""
    for other in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(other.DESCRIPTOR.serialized_pb)
    return POOL
