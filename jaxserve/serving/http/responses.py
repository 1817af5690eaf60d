"""`/v1/responses`: one message of text, whole or as the API's typed events. Nothing is stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.outputs import FinishReason, PositionLogprobs, RequestOutput
from jaxserve.serving.http import answers
from jaxserve.serving.http.answers import Json, TokenNames, to_json
from jaxserve.serving.http.errors import api_error, named
from jaxserve.serving.http.responses_request import ResponsesRequest
from jaxserve.serving.http.streams import events_of, outputs_of
from jaxserve.serving.request_stream import RequestStream
from jaxserve.serving.service import Service


class Responses:
    """One call of /v1/responses."""

    def __init__(self, service: Service, request: ResponsesRequest, answer_id: str):
        self.streamed = request.stream
        self._service = service
        self._request = request
        self._top = request.params.logprobs or 0
        self._names = TokenNames(service, request.output, request.params.skip_special_tokens)
        self._item_id = "msg_" + answer_id.removeprefix("resp_")
        params, defaults = request.params, service.default_sampling
        self._head = {
            "id": answer_id, "object": "response", "created_at": int(time.time()), "model": service.model_name,
            "background": False, "parallel_tool_calls": True, "previous_response_id": None, "store": False,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "truncation": "disabled",
            **{name: defaults.get(name, 1.0) if getattr(params, name) is None else getattr(params, name)
               for name in ("temperature", "top_p")}} | request.repeated

    async def start(self) -> list[RequestStream]:
        """Raises RequestError, QueueFullError, ...: then nothing runs."""
        try:
            with named({"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}):
                return [await self._service.chat(self._request.messages, self._request.params)]
        except RequestError as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = "input"  # which they were made from
            raise

    async def whole(self, streams: Sequence[RequestStream]) -> Json:
        output, = await outputs_of(streams)
        completion = output.outputs[0]
        logprobs = self._logprobs(completion.token_ids, completion.logprobs)
        return self._ended(output, _text_part(completion.text, logprobs))

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        """What goes wrong is an event of its own, response.failed."""
        events, texts, logprobs = _Events(), [], []
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        try:
            begun = self._response("in_progress")
            yield events.of("response.created", response=begun)
            yield events.of("response.in_progress", response=begun)
            yield events.of("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            yield events.of("response.content_part.added", **place, part=_text_part("", []))
            output = None
            async with contextlib.aclosing(events_of(streams)) as increments:
                async for _, event in increments:
                    output = event.output
                    entries = self._logprobs(event.token_ids, event.logprobs)
                    if event.text or entries:
                        texts.append(event.text)
                        logprobs += entries
                        yield events.of("response.output_text.delta", **place, delta=event.text, logprobs=entries)
            assert output is not None
            part = _text_part("".join(texts), logprobs)
            answer = self._ended(output, part)
            yield events.of("response.output_text.done", **place, text=part["text"], logprobs=logprobs)
            yield events.of("response.content_part.done", **place, part=part)
            yield events.of("response.output_item.done", output_index=0, item=answer["output"][0])
            yield events.of(f"response.{answer['status']}", response=answer)
        except Exception as error:
            answer = self._response("failed", [self._item("incomplete", [_text_part("".join(texts), logprobs)])])
            told = api_error(error)
            answer["error"] = {"code": "invalid_prompt" if told.status == 400 else "server_error",
                               "message": str(told)}
            yield events.of("response.failed", response=answer)

    def _logprobs(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs] | None) -> list[Json]:
        if positions is None:
            return []
        return answers.chat_logprobs(self._names, token_ids, positions, self._top)["content"]

    def _ended(self, output: RequestOutput, part: Json) -> Json:
        reason = output.outputs[0].finish_reason
        status = "completed" if reason == "stop" else "incomplete"
        answer = self._response(status, [self._item(status, [part])])
        if status == "completed":
            answer["completed_at"] = int(time.time())
        else:
            answer["incomplete_details"] = {"reason": _REASONS.get(reason)}
        counts = answers.usage([output])
        answer["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"]}
        return answer

    def _response(self, status: str, output: Sequence[Json] = ()) -> Json:
        return self._head | {"status": status, "output": list(output), "error": None, "incomplete_details": None,
                             "completed_at": None, "usage": None}

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}


_REASONS: dict[FinishReason | None, str] = {"length": "max_output_tokens"}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Events:
    """Server-sent events that have a type, and a number in their stream."""

    def __init__(self) -> None:
        self._next = 0

    def of(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._next} | data
        self._next += 1
        return f"event: {kind}\ndata: ".encode() + to_json(event) + b"\n\n"
