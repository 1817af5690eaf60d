"""The bodies of /v1/responses. What such a request has in common with a chat becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.llm import Messages
from jaxserve.sampling_params import SamplingParams, shortened
from jaxserve.serving.http.errors import invalid
from jaxserve.serving.http.fields import (
    FLAG,
    LABELS,
    OBJECT,
    SAMPLING,
    TEXT,
    Field,
    Kind,
    Schema,
    Table,
    choice,
    integer,
    list_of,
    not_implemented,
    sampling,
    text_or_list_of,
)
from jaxserve.serving.http.requests import BOOKKEEPING, MODEL, Output, check_model, spoken_as

LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED_REASONING = "reasoning.encrypted_content"  # of which there is none


def _one_of(table: Table, type_name: str) -> Kind:
    """Objects of a table; of those of another type it is said that they are not implemented."""
    def read(name: str, value: Any) -> dict[str, Any]:
        given = value.get("type", type_name) if isinstance(value, dict) else type_name
        if given != type_name and given not in table.fields["type"].kind.schema["enum"]:
            raise invalid(f"{name}.type {shortened(given)} is not implemented; give text", name)
        return table.read(value, name)

    return Kind(table.schema, read)


# What an answer holds may be sent back as input, so its fields are known here.
_PART = Table("InputPart", {
    "type": Field(choice("input_text", "output_text"), "Both are text.", required=True),
    "text": Field(TEXT, "The text.", required=True),
    "annotations": Field(list_of(OBJECT), "Has no effect."), "logprobs": Field(list_of(OBJECT), "Has no effect."),
})
_ITEM = Table("InputMessage", {
    "type": Field(choice("message"), "An item is a message.", "message"),
    "role": Field(choice("user", "assistant", "system", "developer"), "Who speaks.", required=True),
    "content": Field(text_or_list_of(_one_of(_PART, "input_text")), "What is said.", required=True),
    "id": Field(TEXT, "Has no effect."), "status": Field(TEXT, "Has no effect."),
    "phase": Field(TEXT, "Has no effect."),
})
_FORMAT = Table("TextFormat", {"type": not_implemented("text")})
_TEXT = Table("TextOptions", {"format": Field(_FORMAT.kind, "Only text."), "verbosity": not_implemented("medium")})
_REASONING = Table("ReasoningOptions", {
    "effort": not_implemented("none"), "summary": not_implemented(), "generate_summary": not_implemented()})
_STREAM_OPTIONS = Table("ResponsesStreamOptions", {
    "include_obfuscation": Field(FLAG, "Has no effect: nothing is padded.", False)})
_NO_STORE = "answers are not stored here: send the whole conversation as input"
_NOT_HERE = ("n", "max_tokens", "logprobs", "prompt_logprobs")  # of a chat's sampling fields
_METADATA: Schema = {"type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
                     "additionalProperties": {"type": "string", "maxLength": 512}}


def _read_metadata(name: str, value: Any) -> dict[str, str]:
    labels = LABELS.read(name, value)
    if len(labels) > 16 or any(len(key) > 64 or len(label) > 512 for key, label in labels.items()):
        raise invalid(f"{name} may have at most 16 labels, names of 64 characters and texts of 512", name)
    return labels


RESPONSES = Table("ResponsesRequest", MODEL, {
    "input": Field(text_or_list_of(_one_of(_ITEM, "message")), "A text, or messages.", required=True),
    "instructions": Field(TEXT, "What the system says before the input."),
    "max_output_tokens": Field(integer(1), "Default: the rest of the context."),
    "include": Field(list_of(choice(LOGPROBS, _ENCRYPTED_REASONING)), f"{LOGPROBS}: log-probabilities of the text's "
                                                                      f"tokens."),
    "top_logprobs": Field(integer(0), f"With {LOGPROBS} in include: of so many of the best tokens too."),
    "stream": Field(FLAG, "The answer as server-sent events.", False),
    "stream_options": Field(_STREAM_OPTIONS.kind, "Only with stream."),
}, {name: field for name, field in SAMPLING.items() if name not in _NOT_HERE}, BOOKKEEPING, {
    "metadata": Field(Kind(_METADATA, _read_metadata), "Labels, repeated in the answer."),
    "text": Field(_TEXT.kind, "Only plain text."),
    "reasoning": Field(_REASONING.kind, "Not implemented."),
    "store": not_implemented(False, why=_NO_STORE),
    "previous_response_id": not_implemented(why=_NO_STORE), "conversation": not_implemented(why=_NO_STORE),
}, {name: not_implemented(*neutral) for name, neutral in {
    "background": (False,),
    "truncation": ("disabled",), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "max_tool_calls": (), "prompt": (), "service_tier": ("auto", "default"), "context_management": ([],),
    "moderation": (), "prompt_cache_options": (), "background_options": (), "access_programs": (), "image": (),
    "response_format": (), "structured_outputs": (),
}.items()})

@dataclass(frozen=True, kw_only=True)
class ResponsesRequest:
    """`repeated`: fields that the answer repeats. `max_output_tokens` None: the rest of the context."""

    messages: Messages
    params: SamplingParams
    max_output_tokens: int | None
    repeated: dict[str, Any]
    stream: bool

    @property
    def output(self) -> Output:
        return Output(stream=self.stream)


def responses_request(body: Any, model: str) -> ResponsesRequest:
    """Raises ApiError, RequestError."""
    values = RESPONSES.read(body)
    check_model(values["model"], model)
    if values["stream_options"] is not None and not values["stream"]:
        raise invalid("stream_options is only allowed with stream=true", "stream_options")
    wanted = LOGPROBS in (values["include"] or ())
    if values["top_logprobs"] and not wanted:
        raise invalid(f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")
    params = SamplingParams(**sampling(values), max_tokens=values["max_output_tokens"],
                            logprobs=(values["top_logprobs"] or 0) if wanted else None)
    repeated = {"instructions": values["instructions"], "max_output_tokens": values["max_output_tokens"],
                "metadata": values["metadata"] or {}, "top_logprobs": values["top_logprobs"] or 0}
    return ResponsesRequest(messages=_messages(values), params=params, max_output_tokens=values["max_output_tokens"],
                            repeated=repeated, stream=values["stream"])


def _messages(values: Mapping[str, Any]) -> Messages:
    said = values["instructions"]
    messages: list[Mapping[str, Any]] = [] if said is None else [{"role": "system", "content": said}]
    if isinstance(values["input"], str):
        return [*messages, {"role": "user", "content": values["input"]}]
    for item in values["input"]:
        content = item["content"]
        if not isinstance(content, str):
            content = [{"type": "text", "text": part["text"]} for part in content]
        messages.append(spoken_as({"role": item["role"], "content": content}))
    return messages
