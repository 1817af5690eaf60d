"""The gRPC server: both protocols, health, reflection, keys and certificates on one port."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxserve.errors import ConfigError
from jaxserve.serving.grpc import inference, vllm_engine
from jaxserve.serving.grpc.inference import InferenceServicer
from jaxserve.serving.grpc.vllm_engine import VllmEngineServicer
from jaxserve.serving.protos.pool import POOL
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.protos.vllm import vllm_engine_pb2_grpc
from jaxserve.serving.service import Service, State

# A prompt of a million ids takes 4 MB, log-probabilities of a long prompt some more. gRPC's own limit of 4 MiB is
# too small for them, and no limit lets one client take all memory.
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MIN_PING_INTERVAL_SECONDS = 5  # clients that ping more often than this are sent away
KEEPALIVE_SECONDS = 60  # how often a silent connection is asked whether it is still there
KEEPALIVE_TIMEOUT_SECONDS = 20

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
_SERVICES = (vllm_engine.SERVICE_NAME, inference.SERVICE_NAME)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files. They are read again for new connections when they have changed, so certificates can be renewed
    while the server runs.

    Attributes:
        certificate: the server's certificate chain.
        key: its private key.
        client_ca: certificates that clients' certificates must be signed by. None: clients need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


class GrpcServer:
    """A running server; `serve` makes it.

    Attributes:
        port: where it listens.
    """

    def __init__(self, server: grpc.aio.Server, port: int, servicers: Sequence[InferenceServicer | VllmEngineServicer],
                 health_status: _HealthStatus):
        self.port = port
        self._server = server
        self._servicers = servicers
        self._health_status = health_status

    async def stop(self, grace: float = 0.0) -> None:
        """Takes no more calls. Those that run may end within `grace` seconds; then they are cancelled.

        Health watches and reflection streams do not end by themselves and are not waited for.
        """
        await self._health_status.close()
        stopped = asyncio.ensure_future(self._server.stop(grace))
        idle = asyncio.gather(*(servicer.calls.idle() for servicer in self._servicers))
        await asyncio.wait({stopped, idle}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        await self._server.stop(0)
        await stopped


async def serve(service: Service, host: str, port: int, *, tls: TlsFiles | None = None, tokens: Sequence[str] = (),
                max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, with_reflection: bool = True) -> GrpcServer:
    """Starts a server in the running event loop, the one of the service. It says NOT_SERVING, and refuses
    requests, until the service is ready.

    Args:
        port: 0 chooses one; see GrpcServer.port.
        tokens: of these, a call must carry one as `authorization: Bearer TOKEN` (health checks need none). Empty:
            everybody may call.
        max_message_bytes: largest message that is taken, and sent; larger ones end with RESOURCE_EXHAUSTED.
        with_reflection: tell clients the protocols.

    Raises:
        ConfigError: the address cannot be listened on, or a file of `tls` is of no use.
    """
    interceptors = [_BearerTokens(tokens)] if tokens else []
    server = grpc.aio.server(interceptors=interceptors, options=[
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # else a second server on the same port takes half of the connections
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # Else clients that ping during a long silent prefill are sent away for "too many pings".
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_SECONDS * 1000),
    ])
    inference_servicer, vllm_servicer = InferenceServicer(service), VllmEngineServicer(service)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference_servicer, server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm_servicer, server)
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if with_reflection:
        reflection.enable_server_reflection((*_SERVICES, _HEALTH, _REFLECTION), server, pool=_reflection_pool())
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen on {address}: {error}") from None
    health_status = _HealthStatus(health_servicer)
    await health_status.follow(service)
    await server.start()
    return GrpcServer(server, bound, (inference_servicer, vllm_servicer), health_status)


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

    def __init__(self, tokens: Sequence[str]):
        self._tokens = [token.encode() for token in tokens]

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bearer token is missing or wrong; it is sent as "
                                "metadata, authorization: Bearer TOKEN")

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(f"/{_HEALTH}/") or self._allows(dict(details.invocation_metadata)):
            return await continuation(details)
        return self._refuse

    def _allows(self, metadata: dict[str, str | bytes]) -> bool:
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        # Every token is compared in full, so the time says nothing about how much of one was right.
        equal = [hmac.compare_digest(token.strip().encode(), allowed) for allowed in self._tokens]
        return scheme.lower() == "bearer" and any(equal)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    def read() -> Any:
        client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.certificate.read_bytes())],
                                                         root_certificates=client_ca)

    def stamps() -> list[int]:
        return [path.stat().st_mtime_ns for path in (tls.key, tls.certificate, tls.client_ca) if path is not None]

    try:
        known, first = stamps(), read()
    except OSError as error:
        raise ConfigError(f"a TLS file cannot be read: {error}") from None

    def renewed() -> Any:  # in a thread of grpc's, before each handshake
        nonlocal known
        try:
            if (now := stamps()) == known:
                return None
            configuration = read()
        except OSError:  # in the middle of being replaced
            return None
        known = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=tls.client_ca is not None)


def _reflection_pool() -> DescriptorPool:
    """Our protocols' own pool, with the descriptors of the other services put in."""
    for other in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(other.DESCRIPTOR.serialized_pb)
    return POOL
