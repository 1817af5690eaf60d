"""The blocking client."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
from jaxserve.client.errors import ServerError, client_error
from jaxserve.client.wire import Answer, Messages, Prompt, Request, chat_request, conversation, generate_request
from jaxserve.errors import EngineClosedError, JaxserveError, RequestError
from jaxserve.inputs import failed_output, listed_conversations, listed_prompts, one_params, params_for, progress_bar
from jaxserve.outputs import CompletionOutput, RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc

# Of a list of prompts, so many are with the server at once: enough to fill its batch, and far from its queue's bound.
MAX_CONCURRENT = 128


class Client:
    """A connection to a server. May be used from several threads.

    Args:
        target: host and port, or a host whose server has the default port, or another target that gRPC knows, such as
            "unix:///path".
        token: bearer token.
        tls: None: not encrypted.
        timeout: seconds for each request; the server ends it then. None: no limit.
        max_message_bytes: largest message that is taken or sent.

    Raises:
        ConfigError: the target or `tls` is wrong. Whether the server is there shows with the first request.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, token: str | None = None, tls: ClientTls | None = None,
                 timeout: float | None = None, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES):
        target, options = full_target(target), channel_options(max_message_bytes)
        self._channel = (grpc.insecure_channel(target, options) if tls is None else
                         grpc.secure_channel(target, tls.credentials(), options))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._closed = False
        self._call_options = {"metadata": call_metadata(token), "timeout": timeout}

    def generate(self, prompts: Prompt | Iterable[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
                 **sampling: Any) -> list[RequestOutput]:
        """As `LLM.generate`: for one prompt or many, and waits for all of them.

        Raises:
            RequestError: the only prompt (not in a list) is invalid, or `sampling_params` do not fit the prompts.
            QueueFullError, ServerError: of the only prompt. In a list such errors are in the outputs.
        """
        items, single = listed_prompts(prompts)
        return self._generate(items, single, generate_request, params_for(len(items), sampling_params, sampling),
                              use_tqdm)

    def chat(self, messages: Messages | Iterable[Messages],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             add_generation_prompt: bool | None = None, continue_final_message: bool = False,
             tools: Sequence[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
             use_tqdm: bool = True, **sampling: Any) -> list[RequestOutput]:
        """As `LLM.chat`, for one conversation or many; errors as of `generate`. The template is the server's."""
        def make(item: Messages, params: SamplingParams) -> Request:
            return chat_request(item, params, add_generation_prompt=add_generation_prompt,
                                continue_final_message=continue_final_message, tools=tools,
                                chat_template_kwargs=chat_template_kwargs)

        items, single = listed_conversations(messages)
        return self._generate(items, single, make, params_for(len(items), sampling_params, sampling), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None,
               **sampling: Any) -> Generator[StreamEvent, None, None]:
        """Yields the increments of one request; the last event carries the whole output. Closing the iterator, or
        dropping it, ends the request.

        Args:
            request_id: for `abort`; unique among the server's running requests.

        Raises:
            RequestError, QueueFullError, ServerError: instead of an event.
        """
        return self._stream(generate_request(prompt, one_params(sampling_params, sampling), request_id))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None, *,
                    add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                    tools: Sequence[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
                    request_id: str | None = None, **sampling: Any) -> Generator[StreamEvent, None, None]:
        """As `stream`, for one conversation; options as for `chat`."""
        return self._stream(chat_request(
            messages, one_params(sampling_params, sampling), request_id, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, tools=tools, chat_template_kwargs=chat_template_kwargs))

    def tokenize(self, text: str | Messages, *, add_special_tokens: bool | None = None, **template: Any) -> list[int]:
        """The ids of a text, or of the prompt that a conversation makes (`template`: options as for `chat`)."""
        with _errors():
            return list(self._open_stub().Tokenize(tokenize_request(text, add_special_tokens, template),
                                            **self._call_options).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        with _errors():
            request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
            return self._open_stub().Detokenize(request, **self._call_options).text

    def abort(self, *request_ids: str) -> None:
        """Ends requests, whoever started them. Unknown ids are fine."""
        with _errors():
            self._open_stub().Abort(pb.AbortRequest(request_ids=request_ids), **self._call_options)

    def close(self) -> None:
        """Ends what runs and closes the connection."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_stub(self) -> inference_pb2_grpc.InferenceStub:
        if self._closed:
            raise EngineClosedError("the client has been closed")
        return self._stub

    def _start(self, request: Request) -> Any:
        stub = self._open_stub()
        method = stub.Chat if isinstance(request.message, pb.ChatRequest) else stub.Generate
        return method(request.message, **self._call_options)

    def _stream(self, request: Request) -> Generator[StreamEvent, None, None]:
        call = self._start(request)

        def iterate() -> Generator[StreamEvent, None, None]:
            try:
                yield from _events(call, request)
            finally:
                call.cancel()  # no effect on one that has ended

        iterator = iterate()
        # A generator that is dropped before its first event never enters its try block.
        weakref.finalize(iterator, call.cancel).atexit = False
        return iterator

    def _generate(self, items: list[Any], single: bool, make: Callable[[Any, SamplingParams], Request],
                  params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        """Calls are started ahead and read in order. What comes for the later ones meanwhile waits with the server,
        which merges it, so nothing is lost and nothing piles up."""
        outputs: list[RequestOutput] = []
        ahead: deque[tuple[Request, Any] | RequestOutput] = deque()
        waiting = iter(zip(items, params, strict=True))
        bar = progress_bar(len(items), use_tqdm)
        try:
            while len(outputs) < len(items):
                while len(ahead) < MAX_CONCURRENT and (following := next(waiting, None)) is not None:
                    item, item_params = following
                    try:
                        request = make(item, item_params)
                        ahead.append((request, self._start(request)))
                    except RequestError as error:
                        ahead.append(failed_output(item, error))
                first = ahead[0]
                outputs.append(first if isinstance(first, RequestOutput) else _collect(*first))
                ahead.popleft()
                bar.update(1)
        finally:
            bar.close()
            for entry in ahead:  # after an interrupt
                if not isinstance(entry, RequestOutput):
                    entry[1].cancel()
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs


def tokenize_request(text: str | Messages, add_special_tokens: bool | None,
                     template: dict[str, Any]) -> pb.TokenizeRequest:
    if not isinstance(text, str):
        return pb.TokenizeRequest(conversation=conversation(text, **template), add_special_tokens=add_special_tokens)
    if template:
        raise RequestError(f"{', '.join(sorted(template))} are for conversations, but this is a text")
    return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)


def unfinished(request: Request) -> ServerError:
    return ServerError(f"the answer to {request.request_id} ended before its last message", "UNKNOWN")


def failed_answer(request: Request, error: Exception) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, prompt=request.prompt,
                         prompt_token_ids=request.prompt_token_ids or [],
                         outputs=[CompletionOutput(index, finish_reason="error") for index in range(request.params.n)],
                         error=error)


def _events(call: Iterable[pb.GenerateResponse], request: Request) -> Iterator[StreamEvent]:
    answer = Answer(request)
    with _errors():
        for message in call:
            yield answer.add(message)
    if not answer.finished:
        raise unfinished(request)


def _collect(request: Request, call: Iterable[pb.GenerateResponse]) -> RequestOutput:
    try:
        *_, last = _events(call, request)
    except JaxserveError as error:
        return failed_answer(request, error)
    assert last.output is not None
    return last.output


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise client_error(error) from None
