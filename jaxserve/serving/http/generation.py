"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.outputs import CompletionOutput, RequestOutput, StreamEvent
from jaxserve.serving.http import answers
from jaxserve.serving.http.answers import CompletionLogprobs, Json, TokenNames
from jaxserve.serving.http.errors import invalid, named
from jaxserve.serving.http.requests import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, Output
from jaxserve.serving.http.streams import events_of, guarded, outputs_of, sse, start_all
from jaxserve.serving.request_stream import RequestStream
from jaxserve.serving.service import Service


class Completions:
    """One call of /v1/completions: several prompts, each with n completions. Choice `i * n + j` is completion j of
    prompt i."""

    def __init__(self, service: Service, request: CompletionRequest, answer_id: str):
        self.streamed = request.output.stream
        self._service = service
        self._request = request
        self._n = request.params.n
        self._prompts: list[list[int]] = []
        self._names = TokenNames(service, request.output, request.params.skip_special_tokens)
        self._head = {"id": answer_id, "object": "text_completion", "created": int(time.time()),
                      "model": service.model_name}

    async def start(self) -> list[RequestStream]:
        """Raises RequestError, QueueFullError, ...: then nothing runs."""
        service, request = self._service, self._request
        limit = service.config.max_waiting_requests
        if len(request.prompts) * self._n > limit:
            raise invalid(f"{len(request.prompts)} prompts with n={self._n} are more than the {limit} completions that "
                          f"this server queues; send fewer at a time", "prompt")
        for i, prompt in enumerate(request.prompts):
            with self._of_prompt(i):
                self._prompts.append(await self._ids(prompt))
        return await start_all([self._start(i) for i in range(len(request.prompts))])

    async def _start(self, i: int) -> RequestStream:
        ids = self._prompts[i]
        with self._of_prompt(i):
            return await self._service.generate(
                {"prompt_token_ids": ids}, self._request.params.clone(max_tokens=self._max_tokens(ids)))

    @contextlib.contextmanager
    def _of_prompt(self, i: int) -> Iterator[None]:
        """Errors say which of several prompts is wrong."""
        try:
            yield
        except RequestError as error:
            if len(self._request.prompts) == 1:
                raise
            raise RequestError(f"prompt[{i}]: {error}", error.param) from None

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = await self._service.tokenize(prompt, add_special_tokens=self._request.add_special_tokens,
                                                  must_fit=self._request.truncate is None)
        keep = self._request.truncate
        if keep is not None:
            keep = self._service.config.max_model_len - max(self._request.max_tokens or 1, 1) if keep < 0 else keep
            prompt = prompt[-keep:] if keep > 0 else prompt
        return prompt

    def _max_tokens(self, ids: Sequence[int]) -> int:
        if self._request.max_tokens is not None:
            return self._request.max_tokens
        left = self._service.config.max_model_len - len(ids)
        return max(min(DEFAULT_COMPLETION_TOKENS, left), 1)

    async def whole(self, streams: Sequence[RequestStream]) -> Json:
        outputs = await outputs_of(streams)
        choices = [await self._choice(i, output, completion)
                   for i, output in enumerate(outputs) for completion in output.outputs]
        return self._head | {"choices": choices, "usage": answers.usage(outputs)}

    async def _choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        request = self._request
        parts = []
        if request.params.logprobs is not None:
            table = CompletionLogprobs(self._names)
            if request.echo:
                assert output.prompt_logprobs is not None
                parts.append(table.add(output.prompt_token_ids, output.prompt_logprobs))
            parts.append(table.add(completion.token_ids, completion.logprobs or []))
        logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else None
        choice = {"index": i * self._n + completion.index, "text": await self._echo(i) + completion.text,
                  "logprobs": logprobs, "finish_reason": completion.finish_reason,
                  "stop_reason": completion.stop_reason}
        if request.output.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
        if request.params.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.prompt_logprobs(output)
        return choice

    async def _echo(self, i: int) -> str:
        prompt = self._request.prompts[i]
        if not self._request.echo:
            return ""
        if isinstance(prompt, str) and self._request.truncate is None:
            return prompt
        return await self._service.decode(self._prompts[i],
                                          skip_special_tokens=self._request.params.skip_special_tokens)

    def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        return guarded(self._stream(streams))

    async def _stream(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        usage = StreamUsage(self._request.output, streams)
        tables = [CompletionLogprobs(self._names) for _ in range(len(streams) * self._n)]
        begun: set[int] = set()  # prompts
        async with contextlib.aclosing(events_of(streams)) as events:
            async for i, event in events:
                usage.add(event)
                if i not in begun:
                    begun.add(i)
                    for choice in await self._beginnings(i, event, tables):
                        yield sse(self._head | {"choices": [choice]} | usage.so_far())
                if _says_something(event, self._request.output.return_token_ids):
                    choice = self._chunk(i, event, tables[i * self._n + event.index])
                    yield sse(self._head | {"choices": [choice]} | usage.so_far())
        if self._request.output.include_usage:
            yield sse(self._head | {"choices": []} | usage.total())

    async def _beginnings(self, i: int, first: StreamEvent, tables: Sequence[CompletionLogprobs]) -> list[Json]:
        """The prompt, for each completion of it, if it is to be shown: its text, its logprobs, its ids."""
        request = self._request
        if not request.echo and not request.output.return_token_ids:
            return []
        text, choices = await self._echo(i), []
        for index in range(i * self._n, (i + 1) * self._n):
            logprobs = None
            if request.echo and request.params.logprobs is not None and first.prompt_logprobs is not None:
                logprobs = tables[index].add(self._prompts[i], first.prompt_logprobs)
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
            if request.output.return_token_ids:
                choice |= {"prompt_token_ids": self._prompts[i], "token_ids": []}
            choices.append(choice)
        return choices

    def _chunk(self, i: int, event: StreamEvent, table: CompletionLogprobs) -> Json:
        logprobs = None if event.logprobs is None else table.add(event.token_ids, event.logprobs)
        choice = {"index": i * self._n + event.index, "text": event.text, "logprobs": logprobs,
                  "finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
        if self._request.output.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice


class Chat:
    """One call of /v1/chat/completions."""

    def __init__(self, service: Service, request: ChatRequest, answer_id: str):
        self.streamed = request.output.stream
        self._service = service
        self._request = request
        self._top = request.params.logprobs or 0
        self._names = TokenNames(service, request.output, request.params.skip_special_tokens)
        self._head = {"id": answer_id, "object": "chat.completion", "created": int(time.time()),
                      "model": service.model_name}

    async def start(self) -> list[RequestStream]:
        """Raises RequestError, QueueFullError, ...: then nothing runs."""
        request = self._request
        with named(request.names):
            return [await self._service.chat(request.messages, request.params, template=request.template)]

    async def whole(self, streams: Sequence[RequestStream]) -> Json:
        output, = await outputs_of(streams)
        answer = self._head | {"choices": [self._choice(completion) for completion in output.outputs],
                               "usage": answers.usage([output])}
        if self._request.output.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if self._request.params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = answers.prompt_logprobs(output)
        return answer

    def _choice(self, completion: CompletionOutput) -> Json:
        logprobs = None
        if completion.logprobs is not None:
            logprobs = answers.chat_logprobs(self._names, completion.token_ids, completion.logprobs, self._top)
        choice = {"index": completion.index,
                  "message": {"role": "assistant", "content": completion.text, "refusal": None},
                  "logprobs": logprobs, "finish_reason": completion.finish_reason,
                  "stop_reason": completion.stop_reason}
        if self._request.output.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        return guarded(self._stream(streams))

    async def _stream(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        options = self._request.output
        usage = StreamUsage(options, streams)
        head = self._head | {"object": "chat.completion.chunk"}
        async with contextlib.aclosing(events_of(streams)) as events:
            for index in range(self._request.params.n):
                role = _chunk_choice(index, {"role": "assistant", "content": ""})
                prompt: Json = {"prompt_token_ids": streams[0].prompt_token_ids} if options.return_token_ids else {}
                yield sse(head | {"choices": [role]} | prompt | usage.so_far())
            async for _, event in events:
                usage.add(event)
                if _says_something(event, options.return_token_ids):
                    yield sse(head | {"choices": [self._chunk(event)]} | usage.so_far())
        if options.include_usage:
            yield sse(head | {"choices": []} | usage.total())

    def _chunk(self, event: StreamEvent) -> Json:
        choice = _chunk_choice(event.index, {"content": event.text} if event.text else {})
        choice["finish_reason"] = event.finish_reason
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        if event.logprobs:
            choice["logprobs"] = answers.chat_logprobs(self._names, event.token_ids, event.logprobs, self._top)
        if self._request.output.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice


class StreamUsage:
    """What the chunks of a stream say about usage: nothing, null but for the last one, or what it is so far."""

    def __init__(self, options: Output, streams: Sequence[RequestStream]):
        self._options = options
        self._prompt = sum(len(stream.prompt_token_ids) for stream in streams)
        self._completion = 0
        self._outputs: list[RequestOutput] = []

    def add(self, event: StreamEvent) -> None:
        self._completion += len(event.token_ids)
        if event.output is not None:
            self._outputs.append(event.output)

    def so_far(self) -> Json:
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage:
            return {"usage": None}
        return {"usage": {"prompt_tokens": self._prompt, "completion_tokens": self._completion,
                          "total_tokens": self._prompt + self._completion}}

    def total(self) -> Json:
        return {"usage": answers.usage(self._outputs)}


def _chunk_choice(index: int, delta: dict[str, Any]) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _says_something(event: StreamEvent, token_ids_count: bool) -> bool:
    """Whether a client gets anything from this event: a token may be part of a character, or be held back because a
    stop string may begin there."""
    return bool(event.text or event.logprobs or event.finish_reason is not None
                or (token_ids_count and event.token_ids))
