"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxserve.outputs import CompletionOutput, RequestOutput, StreamEvent
from jaxserve.serving.http import answers
from jaxserve.serving.http.answers import CompletionLogprobs, Json, TokenNames
from jaxserve.serving.http.errors import invalid
from jaxserve.serving.http.requests import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest
from jaxserve.serving.http.streams import events_of, outputs_of, sse, start_all
from jaxserve.serving.service import RequestStream, Service


class Completions:
    """One call of /v1/completions: several prompts, each with n completions. Choice `i * n + j` is completion j of
    prompt i."""

    def __init__(self, service: Service, request: CompletionRequest, answer_id: str):
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
        self._prompts = [await self._ids(prompt) for prompt in request.prompts]
        return await start_all([service.generate({"prompt_token_ids": ids}, request.params.clone(
            max_tokens=self._max_tokens(ids))) for ids in self._prompts])

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = await self._service.tokenize(prompt, add_special_tokens=self._request.add_special_tokens)
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
        prompt = await self._echo(i)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = self._logprobs(output, completion)
        choice = {"index": i * self._n + completion.index, "text": prompt + completion.text, "logprobs": logprobs,
                  "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        if request.output.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
        if request.params.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.prompt_logprobs(output)
        return choice

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        table = CompletionLogprobs(self._names)
        parts = []
        if self._request.echo:
            assert output.prompt_logprobs is not None
            parts.append(table.add(output.prompt_token_ids, output.prompt_logprobs))
        parts.append(table.add(completion.token_ids, completion.logprobs or []))
        return {name: [value for part in parts for value in part[name]] for name in parts[0]}

    async def _echo(self, i: int) -> str:
        prompt = self._request.prompts[i]
        if not self._request.echo:
            return ""
        if isinstance(prompt, str) and self._request.truncate is None:
            return prompt
        return await self._service.detokenize(self._prompts[i],
                                              skip_special_tokens=self._request.params.skip_special_tokens)

    async def stream(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        output_options = self._request.output
        null_usage: Json = {"usage": None} if output_options.include_usage else {}
        outputs: list[RequestOutput] = []
        if self._request.params.prompt_logprobs is not None:  # they come at the end, and belong at the beginning
            outputs = await outputs_of(streams)
            for i, output in enumerate(outputs):
                for completion in output.outputs:
                    yield sse(self._head | {"choices": [await self._choice(i, output, completion)]} | null_usage)
        else:
            echoes = [await self._echo(i) for i in range(len(streams))]
            begun: set[int] = set()
            tables: dict[int, CompletionLogprobs] = {}
            async with contextlib.aclosing(events_of(streams)) as events:
                async for i, event in events:
                    if event.output is not None:
                        outputs.append(event.output)
                    index = i * self._n + event.index
                    choice = self._chunk(index, event, tables)
                    if index not in begun:
                        choice["text"] = echoes[i] + choice["text"]
                        if output_options.return_token_ids:
                            choice["prompt_token_ids"] = self._prompts[i]
                    elif not _says_something(event, output_options.return_token_ids):
                        continue
                    begun.add(index)
                    yield sse(self._head | {"choices": [choice]} | null_usage)
        if output_options.include_usage:
            yield sse(self._head | {"choices": [], "usage": answers.usage(outputs)})

    def _chunk(self, index: int, event: StreamEvent, tables: dict[int, CompletionLogprobs]) -> Json:
        logprobs = None
        if event.logprobs is not None:
            table = tables.setdefault(index, CompletionLogprobs(self._names))
            logprobs = table.add(event.token_ids, event.logprobs)
        choice = {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason,
                  "stop_reason": event.stop_reason}
        if self._request.output.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice


class Chat:
    """One call of /v1/chat/completions."""

    def __init__(self, service: Service, request: ChatRequest, answer_id: str):
        self._service = service
        self._request = request
        self._top = request.params.logprobs or 0
        self._names = TokenNames(service, request.output, request.params.skip_special_tokens)
        self._head = {"id": answer_id, "object": "chat.completion", "created": int(time.time()),
                      "model": service.model_name}

    async def start(self) -> list[RequestStream]:
        """Raises RequestError, QueueFullError, ...: then nothing runs."""
        request = self._request
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

    async def stream(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        options = self._request.output
        head = self._head | {"object": "chat.completion.chunk"}
        null_usage: Json = {"usage": None} if options.include_usage else {}
        output = None
        async with contextlib.aclosing(events_of(streams)) as events:
            for index in range(self._request.params.n):
                role = _chunk_choice(index, {"role": "assistant", "content": ""})
                prompt: Json = {"prompt_token_ids": streams[0].prompt_token_ids} if options.return_token_ids else {}
                yield sse(head | {"choices": [role]} | prompt | null_usage)
            async for _, event in events:
                output = event.output
                if _says_something(event, options.return_token_ids):
                    yield sse(head | {"choices": [self._chunk(event)]} | null_usage)
        if options.include_usage:
            assert output is not None
            yield sse(head | {"choices": [], "usage": answers.usage([output])})

    def _chunk(self, event: StreamEvent) -> Json:
        choice = _chunk_choice(event.index, {"content": event.text} if event.text else {})
        choice |= {"finish_reason": event.finish_reason}
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        if event.logprobs:
            choice["logprobs"] = answers.chat_logprobs(self._names, event.token_ids, event.logprobs, self._top)
        if self._request.output.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice


def _chunk_choice(index: int, delta: dict[str, Any]) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _says_something(event: StreamEvent, token_ids_count: bool) -> bool:
    """Whether a client gets anything from this event: a token may be part of a character, or be held back because a
    stop string may begin there."""
    return bool(event.text or event.logprobs or event.finish_reason is not None
                or (token_ids_count and event.token_ids))
