"""Between Python's values and the messages of jaxserve.v1, on the client's side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.inputs import new_request_id
from jaxserve.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestTimings,
    StreamEvent,
)
from jaxserve.sampling_params import SamplingParams, check_text, check_token_ids
from jaxserve.serving.protos.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}
_DEFAULTS = SamplingParams()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request ready to be sent, and what its answer is put together with."""

    message: pb.GenerateRequest | pb.ChatRequest
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int] | None  # None: the server sends them

    @property
    def request_id(self) -> str:
        return self.message.request_id


def generate_request(prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
    """Raises RequestError for what no message can hold; everything else is checked by the server."""
    text, ids = None, None
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
            raise RequestError('a prompt given as a dict has the one key "prompt" or "prompt_token_ids", got the keys '
                               f"{sorted(map(str, prompt))}", "prompt")
        (prompt,) = prompt.values()
    message = pb.GenerateRequest(request_id=_request_id(request_id), sampling=sampling_message(params))
    if isinstance(prompt, str):
        message.text = text = check_text("prompt", prompt)
        message.return_prompt_token_ids = True
    else:
        ids = list(check_token_ids("prompt", prompt))
        message.token_ids.ids.extend(ids)
        message.token_ids.SetInParent()
    return Request(message, params, text, ids)


def chat_request(messages: Messages, params: SamplingParams, request_id: str | None = None,
                 **template: Any) -> Request:
    """`template`: as for `conversation`. Raises RequestError."""
    return Request(pb.ChatRequest(request_id=_request_id(request_id), sampling=sampling_message(params),
                                  conversation=conversation(messages, **template), return_prompt_token_ids=True),
                   params, None, None)


def conversation(messages: Messages, *, add_generation_prompt: bool | None = None,
                 continue_final_message: bool = False, tools: Sequence[Mapping[str, Any]] | None = None,
                 chat_template_kwargs: Mapping[str, Any] | None = None) -> pb.Conversation:
    message = pb.Conversation(add_generation_prompt=add_generation_prompt,
                              continue_final_message=continue_final_message)
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"messages must be a list of messages, got {type(messages).__name__}", "messages")
    for i, fields in enumerate(messages):
        message.messages.append(_message(fields, f"messages[{i}]"))
    if tools:
        message.tools_json = _json(list(tools), "tools")
    if chat_template_kwargs:
        message.chat_template_kwargs_json = _json(dict(chat_template_kwargs), "chat_template_kwargs")
    return message


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The fields that differ from their defaults; the others are the server's to fill."""
    message = pb.SamplingParams()
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is None or value == getattr(_DEFAULTS, field.name):
            continue
        if field.name == "stop":
            message.stop.extend(params.stop_strings)
        elif isinstance(value, Mapping):
            getattr(message, field.name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, field.name).extend(value)
        elif field.name == "seed" and isinstance(value, int):
            message.seed = value - 2**64 if value >= 2**63 else value  # the same 64 bits, with a sign
        else:
            setattr(message, field.name, value)
    return message


class Answer:
    """Puts one request's messages together: into a StreamEvent each, the last with the whole RequestOutput."""

    def __init__(self, request: Request):
        params = request.params
        self.finished = False
        self._prompt = request.prompt
        self._prompt_token_ids = request.prompt_token_ids or []
        self._request_id = request.request_id
        self._has_prompt_logprobs = params.prompt_logprobs is not None
        self._has_logprobs = params.logprobs is not None
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        self._completions = [CompletionOutput(index, logprobs=[] if self._has_logprobs else None)
                             for index in range(params.n)]

    def add(self, message: pb.GenerateResponse) -> StreamEvent:
        if message.HasField("prompt"):
            self._request_id = message.prompt.request_id
            if message.prompt.token_ids:
                self._prompt_token_ids = list(message.prompt.token_ids)
        ids = list(message.token_ids)
        logprobs = [_position_logprobs(position) for position in message.logprobs] if self._has_logprobs else None
        completion = self._completions[message.index]
        self._texts[message.index].append(message.text)
        completion.token_ids += ids
        if logprobs is not None:
            assert completion.logprobs is not None
            completion.logprobs += logprobs
        if message.HasField("finish"):
            self._finish(completion, message.finish)
        self.finished = message.HasField("usage")
        return StreamEvent(message.index, message.text, ids, logprobs,
                           completion.finish_reason if message.HasField("finish") else None, completion.stop_reason,
                           self._output(message) if self.finished else None)

    def _finish(self, completion: CompletionOutput, finish: pb.Finish) -> None:
        completion.text = "".join(self._texts[completion.index])
        completion.finish_reason = _FINISH_REASONS[finish.reason]
        kind = finish.WhichOneof("stop")
        completion.stop_reason = None if kind is None else getattr(finish, kind)
        if completion.logprobs is not None:
            completion.cumulative_logprob = sum(
                position[token_id].logprob for token_id, position in zip(completion.token_ids, completion.logprobs))

    def _output(self, last: pb.GenerateResponse) -> RequestOutput:
        prompt_logprobs = None
        if self._has_prompt_logprobs:
            prompt_logprobs = [_position_logprobs(position) or None for position in last.prompt_logprobs]
        timings = {field.name: getattr(last.timings, field.name) for field in dataclasses.fields(RequestTimings)
                   if last.timings.HasField(field.name)}
        return RequestOutput(
            request_id=self._request_id, prompt=self._prompt, prompt_token_ids=self._prompt_token_ids,
            outputs=self._completions, prompt_logprobs=prompt_logprobs, num_cached_tokens=last.usage.cached_tokens,
            timings=RequestTimings(**timings))


def _position_logprobs(position: pb.PositionLogprobs) -> PositionLogprobs:
    return {entry.token_id: Logprob(entry.logprob, entry.rank, entry.decoded if entry.HasField("decoded") else None)
            for entry in position.entries}


def _message(fields: Any, param: str) -> pb.Message:
    if not isinstance(fields, Mapping):
        raise RequestError(f"{param} must be an object with role and content, got {type(fields).__name__}", param)
    if not isinstance(fields.get("role"), str):
        raise RequestError(f'{param}.role must be a text such as "user", got {fields.get("role")!r}', param)
    message = pb.Message(role=check_text(param, fields["role"]))
    extra = {key: value for key, value in fields.items() if key != "role"}
    if isinstance(fields.get("content"), str):
        message.content = check_text(param, extra.pop("content"))
    if extra:
        message.extra_json = _json(extra, param)
    return message


def _request_id(given: object) -> str:
    if given is None or given == "":
        return new_request_id()
    return check_text("request_id", given)


def _json(value: Any, param: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param) from None
