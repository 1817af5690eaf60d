"""Clients of a jaxserve server over gRPC. They feel like the offline `LLM`: same methods, same arguments, same
outputs. `Client` blocks; `AsyncClient` is for coroutines. Neither needs an accelerator, nor imports jax."""

import importlib.util

if any(importlib.util.find_spec(package) is None for package in ("grpc", "google", "google.rpc", "grpc_status")):
    raise ImportError("jaxserve.client needs grpcio and grpcio-status: pip install 'jaxserve[serve]'")

from jaxserve.client.aio import AsyncClient
from jaxserve.client.channel import ClientTls
from jaxserve.client.errors import ServerError, ServerTimeoutError
from jaxserve.client.sync import Client

__all__ = ["AsyncClient", "Client", "ClientTls", "ServerError", "ServerTimeoutError"]
