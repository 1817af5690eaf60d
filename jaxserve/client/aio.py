"""The client for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from jaxserve.client.channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    ClientTls,
    call_metadata,
    channel_options,
    full_target,
)
from jaxserve.client.errors import client_error
from jaxserve.client.sync import MAX_CONCURRENT, failed_answer, tokenize_request, unfinished
from jaxserve.client.wire import Answer, Messages, Prompt, Request, chat_request, generate_request
from jaxserve.errors import EngineClosedError, JaxserveError, RequestError
from jaxserve.inputs import failed_output, listed_conversations, listed_prompts, one_params, params_for
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc


class AsyncClient:
    """As `Client`, for one event loop: `generate`, `chat`, `tokenize`, `detokenize` and `abort` are awaited, `stream`
    and `stream_chat` are asynchronous iterators. Cancelling what waits ends the request."""

    def __init__(self, target: str = DEFAULT_TARGET, *, token: str | None = None, tls: ClientTls | None = None,
                 timeout: float | None = None, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES):
        target, options = full_target(target), channel_options(max_message_bytes)
        self._channel = (grpc.aio.insecure_channel(target, options) if tls is None else
                         grpc.aio.secure_channel(target, tls.credentials(), options))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._closed = False
        self._call_options = {"metadata": call_metadata(token), "timeout": timeout}

    async def generate(self, prompts: Prompt | Iterable[Prompt],
                       sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                       **sampling: Any) -> list[RequestOutput]:
        """See Client.generate."""
        items, single = listed_prompts(prompts)
        return await self._generate(items, single, generate_request,
                                    params_for(len(items), sampling_params, sampling))

    async def chat(self, messages: Messages | Iterable[Messages],
                   sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                   add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                   tools: Sequence[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
                   **sampling: Any) -> list[RequestOutput]:
        """See Client.chat."""
        def make(item: Messages, params: SamplingParams) -> Request:
            return chat_request(item, params, add_generation_prompt=add_generation_prompt,
                                continue_final_message=continue_final_message, tools=tools,
                                chat_template_kwargs=chat_template_kwargs)

        items, single = listed_conversations(messages)
        return await self._generate(items, single, make, params_for(len(items), sampling_params, sampling))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None,
               **sampling: Any) -> AsyncGenerator[StreamEvent, None]:
        """See Client.stream. The request starts when the first event is awaited."""
        return self._events(generate_request(prompt, one_params(sampling_params, sampling), request_id))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None, *,
                    add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                    tools: Sequence[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
                    request_id: str | None = None, **sampling: Any) -> AsyncGenerator[StreamEvent, None]:
        """See Client.stream_chat."""
        return self._events(chat_request(
            messages, one_params(sampling_params, sampling), request_id, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, tools=tools, chat_template_kwargs=chat_template_kwargs))

    async def tokenize(self, text: str | Messages, *, add_special_tokens: bool | None = None,
                       **template: Any) -> list[int]:
        """See Client.tokenize."""
        with _errors():
            response = await self._open_stub().Tokenize(tokenize_request(text, add_special_tokens, template),
                                                 **self._call_options)
            return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        with _errors():
            request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
            return (await self._open_stub().Detokenize(request, **self._call_options)).text

    async def abort(self, *request_ids: str) -> None:
        """Ends requests, whoever started them. Unknown ids are fine."""
        with _errors():
            await self._open_stub().Abort(pb.AbortRequest(request_ids=request_ids), **self._call_options)

    async def close(self) -> None:
        """Ends what runs and closes the connection."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open_stub(self) -> inference_pb2_grpc.InferenceStub:
        if self._closed:
            raise EngineClosedError("the client has been closed")
        return self._stub

    async def _events(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        stub = self._open_stub()
        method = stub.Chat if isinstance(request.message, pb.ChatRequest) else stub.Generate
        call = method(request.message, **self._call_options)
        answer = Answer(request)
        try:
            with _errors():
                async for message in call:
                    yield answer.add(message)
        finally:
            call.cancel()  # no effect on one that has ended
        if not answer.finished:
            raise unfinished(request)

    async def _generate(self, items: list[Any], single: bool, make: Callable[[Any, SamplingParams], Request],
                        params: list[SamplingParams]) -> list[RequestOutput]:
        room = asyncio.Semaphore(MAX_CONCURRENT)
        self._open_stub()  # else each prompt would have the error

        async def one(item: Any, item_params: SamplingParams) -> RequestOutput:
            try:
                request = make(item, item_params)
            except RequestError as error:
                return failed_output(item, error)
            async with room:
                return await self._collect(request)

        async with asyncio.TaskGroup() as group:  # if one is interrupted all are
            tasks = [group.create_task(one(item, item_params)) for item, item_params in zip(items, params, strict=True)]
        outputs = [task.result() for task in tasks]
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    async def _collect(self, request: Request) -> RequestOutput:
        last = None
        try:
            async for event in self._events(request):
                last = event
        except JaxserveError as error:
            return failed_answer(request, error)
        assert last is not None and last.output is not None
        return last.output


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:  # AioRpcError is one
        raise client_error(error) from None
