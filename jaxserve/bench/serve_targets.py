"""Servers to be measured: any OpenAI endpoint over HTTP, and jaxserve's own gRPC.

A target sends one request and writes down what comes back, with the moments of the event loop's clock. It raises
nothing for a request that fails: its kind is the exchange's `error`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from jaxserve.bench.serve_load import Prompt, PromptKind
from jaxserve.bench.serve_metrics import Chunk, Exchange
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.client import AsyncClient

# What these say in /v1/models; both know the fields `ignore_eos` and `return_token_ids`.
_KNOW_OUR_FIELDS = ("jaxserve", "vllm")
_HINTS: dict[int | str, str] = dict.fromkeys((401, "UNAUTHENTICATED"), "; give --api-key")
_REASON_BYTES = 500

logger = logging.getLogger(__name__)


class _Reasons:
    """What a server said of its first failure of each kind goes to the log; the report counts kinds."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, kind: str, reason: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("a request failed: %s: %s", kind, reason)


class Target(Protocol):
    """An asynchronous context manager that talks to one server."""

    name: str
    kind: PromptKind  # of prompts that it takes

    async def __aenter__(self) -> Target: ...
    async def __aexit__(self, *exc_info: Any) -> None: ...

    async def send(self, prompt: Prompt, max_tokens: int, exchange: Exchange) -> None:
        """Sends a request and reads its answer to the end, into `exchange`. Cancelling ends the request."""
        ...


class OpenAITarget:
    """`/v1/completions` or `/v1/chat/completions`, streamed.

    Args:
        url: with or without /v1.
        kind: "messages" asks the chat API, the others completions.
        model: None: the first that the server names.
        sampling: further fields of the bodies.
        our_fields: send `ignore_eos` and `return_token_ids`; None: if the server is known to have them.
    """

    def __init__(self, url: str, *, kind: PromptKind = "ids", model: str | None = None, api_key: str | None = None,
                 sampling: Mapping[str, Any] | None = None, our_fields: bool | None = None):
        self.kind: PromptKind = kind
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name = self._base
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._sampling = dict(sampling or {})
        self._our_fields = our_fields
        self._session: aiohttp.ClientSession
        self._reasons = _Reasons()

    async def __aenter__(self) -> OpenAITarget:
        # A connection for each request that runs: the number of those is the load's business.
        self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0),
                                              timeout=aiohttp.ClientTimeout(total=None))
        try:
            await self._ask_for_models()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._session.close()

    async def _ask_for_models(self) -> None:
        url = f"{self._base}/models"
        try:
            async with self._session.get(url) as answer:
                models = (await answer.json())["data"] if answer.status == 200 else []
                reason = f"status {answer.status}{_HINTS.get(answer.status, '')}"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            models, reason = [], f"{type(error).__name__}: {error}"
        known = {model.get("id"): model.get("owned_by") for model in models}
        if self._model is None:
            if not known:
                raise ConfigError(f"{url} names no model ({reason}); is a server there? Else give --model")
            self._model = next(iter(known))
        if self._our_fields is None:
            self._our_fields = known.get(self._model) in _KNOW_OUR_FIELDS

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "stream": True,
                                "stream_options": {"include_usage": True}, "temperature": 0}
        body["messages" if self.kind == "messages" else "prompt"] = prompt
        if self._our_fields:
            body |= {"ignore_eos": True, "return_token_ids": True}
        return body | self._sampling

    async def send(self, prompt: Prompt, max_tokens: int, exchange: Exchange) -> None:
        path = "/chat/completions" if self.kind == "messages" else "/completions"
        body = json.dumps(self._body(prompt, max_tokens)).encode()
        clock = asyncio.get_running_loop().time
        exchange.sent = clock()
        try:
            async with self._session.post(self._base + path, data=body,
                                          headers={"Content-Type": "application/json"}) as answer:
                if answer.status != 200:
                    exchange.error = f"HTTP {answer.status}"
                    said = (await answer.content.read(_REASON_BYTES)).decode(errors="replace")
                    self._reasons.tell(exchange.error, said + _HINTS.get(answer.status, ""))
                    return
                await read_answer(answer.content.iter_any(), exchange)
        except (aiohttp.ClientError, OSError) as error:
            exchange.error = _connection_fault(error)


def _connection_fault(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    return "connection lost"


async def read_answer(blocks: AsyncIterator[bytes], exchange: Exchange) -> None:
    """Reads a streamed answer, from the body's blocks as they come. The tokens of one block came together."""
    clock = asyncio.get_running_loop().time
    texts: list[str] = []
    ended = False
    async for payloads in _events(blocks):
        at = clock()
        came, tokens = False, 0
        for payload in payloads:
            if payload == b"[DONE]":
                ended = True
                continue
            try:
                event = json.loads(payload)
            except ValueError:
                exchange.error = "not JSON"
                return
            if "error" in event:
                exchange.error = "error in the stream"
                return
            if (usage := event.get("usage")) is not None:
                _read_usage(usage, exchange)
            for choice in event.get("choices", ()):
                text, ids = _content(choice)
                texts.append(text)
                if ids is not None:
                    exchange.token_ids = (exchange.token_ids or []) + ids
                    came, tokens = came or bool(ids), tokens + len(ids)
                else:
                    came = came or bool(text)
        if came:
            exchange.chunks.append(Chunk(at, tokens or None))
    exchange.text = "".join(texts)
    if not ended:
        exchange.error = "ended early"


def _content(choice: Mapping[str, Any]) -> tuple[str, list[int] | None]:
    delta = choice.get("delta", choice)
    text = delta.get("content", delta.get("text")) or ""
    # Reasoning is output, too; what servers call it differs.
    return (delta.get("reasoning") or delta.get("reasoning_content") or "") + text, choice.get("token_ids")


def _read_usage(usage: Mapping[str, Any], exchange: Exchange) -> None:
    exchange.prompt_tokens, exchange.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    exchange.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def _events(blocks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The data of the server-sent events that each block completes."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        payloads = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if payloads:
            yield payloads


class GrpcTarget:
    """jaxserve.v1 of a jaxserve server.

    Args:
        target: host and port.
        sampling: fields of SamplingParams.
    """

    def __init__(self, target: str, *, kind: PromptKind = "ids", api_key: str | None = None,
                 sampling: Mapping[str, Any] | None = None):
        self.kind: PromptKind = kind
        self.name = f"grpc://{target}"
        self._target, self._token = target, api_key
        self._client: AsyncClient
        self._reasons = _Reasons()
        self._params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **(sampling or {})})

    async def __aenter__(self) -> GrpcTarget:
        from jaxserve.client import AsyncClient  # here, since HTTP needs no grpc

        self._client = AsyncClient(self._target, token=self._token)  # in the event loop that it belongs to
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._client.close()

    async def send(self, prompt: Prompt, max_tokens: int, exchange: Exchange) -> None:
        from jaxserve.client import ServerError

        clock = asyncio.get_running_loop().time
        params = self._params.clone(max_tokens=max_tokens)
        exchange.sent = clock()
        start: Any = self._client.stream_chat if self.kind == "messages" else self._client.stream
        try:
            async for event in start(prompt, params):
                if event.token_ids:
                    exchange.chunks.append(Chunk(clock(), len(event.token_ids)))
                if event.output is not None:
                    completion, = event.output.outputs
                    exchange.text, exchange.token_ids = completion.text, completion.token_ids
                    exchange.completion_tokens = len(completion.token_ids)
                    exchange.prompt_tokens = len(event.output.prompt_token_ids)
                    exchange.cached_tokens = event.output.num_cached_tokens
        except JaxserveError as error:
            exchange.error = error.code if isinstance(error, ServerError) else type(error).__name__
            self._reasons.tell(exchange.error, f"{error}{_HINTS.get(exchange.error, '')}")
