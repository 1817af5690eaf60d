"""The bodies of requests, checked as far as that needs no model."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.llm import Messages
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.http.errors import invalid
from jaxserve.serving.http.fields import Fields

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default


@dataclass(frozen=True, kw_only=True)
class Output:
    """How an answer is to look.

    Attributes:
        stream: as server-sent events.
        include_usage: in a stream, an event with the usage at the end.
        return_token_ids: also as ids.
        tokens_as_ids: in logprobs, tokens are "token_id:7" and not text.
    """

    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """`max_tokens` None: the default, or what is left of the context if that is less. `truncate`: keep so many of the
    prompt's last tokens; -1: as many as the context takes."""

    prompts: list[str | list[int]]
    params: SamplingParams
    max_tokens: int | None
    echo: bool
    add_special_tokens: bool
    truncate: int | None
    output: Output


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """`template`: the options of LLM.chat."""

    messages: Messages
    params: SamplingParams
    template: dict[str, Any]
    output: Output


def completion_request(body: Any, model: str) -> CompletionRequest:
    """Raises ApiError, RequestError."""
    fields = Fields(body)
    fields.model(model)
    prompts = prompt_list(fields.take("prompt"))
    output = _output(fields)
    sampling = fields.sampling()
    echo, max_tokens, logprobs = fields.flag("echo"), fields.take("max_tokens"), fields.take("logprobs")
    _check_best_of(fields, sampling)
    add_special_tokens, truncate = fields.flag("add_special_tokens", True), fields.integer("truncate_prompt_tokens", -1)
    if truncate == 0:
        raise invalid("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    fields.end()
    if output.stream and sampling.get("prompt_logprobs") is not None:
        raise invalid("prompt_logprobs cannot be streamed; use echo with logprobs, or stream=false", "prompt_logprobs")
    if echo and sampling.get("prompt_logprobs") is None and (logprobs is not None or max_tokens == 0):
        sampling["prompt_logprobs"] = 0 if logprobs is None else logprobs
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens must be at least 1, got 0; 0 is only allowed with echo", "max_tokens")
    params = SamplingParams(**sampling, max_tokens=max_tokens, logprobs=logprobs)
    return CompletionRequest(prompts=prompts, params=params, max_tokens=params.max_tokens, echo=echo,
                             add_special_tokens=add_special_tokens, truncate=truncate, output=output)


def chat_request(body: Any, model: str, *, trust_templates: bool) -> ChatRequest:
    """Raises ApiError, RequestError."""
    fields = Fields(body)
    fields.model(model)
    messages, template = conversation(fields, trust_templates=trust_templates)
    output = _output(fields)
    sampling = fields.sampling()
    # The newer name counts if both are given.
    old, new = fields.take("max_tokens"), fields.take("max_completion_tokens")
    max_tokens = old if new is None else new
    if fields.flag("logprobs"):
        sampling["logprobs"] = fields.take("top_logprobs", 0)
    elif fields.take("top_logprobs", 0) != 0:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    if max_tokens == 0:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise invalid(f"{name} must be at least 1, got 0", name)
    if output.stream and sampling.get("prompt_logprobs") is not None:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    fields.end()
    return ChatRequest(messages=messages, params=SamplingParams(**sampling, max_tokens=max_tokens), template=template,
                       output=output)


def conversation(fields: Fields, *, trust_templates: bool) -> tuple[Messages, dict[str, Any]]:
    """The messages, and the options of LLM.chat that render them."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list with at least one message", "messages")
    if not all(isinstance(message, Mapping) for message in messages):
        raise invalid("each message must be an object with role and content", "messages")
    template: dict[str, Any] = {}
    continued = fields.flag("continue_final_message")
    opened = fields.flag("add_generation_prompt", not continued)
    if continued and opened:
        raise invalid("add_generation_prompt and continue_final_message exclude each other; set one of them",
                      "continue_final_message")
    template |= {"continue_final_message": continued, "add_generation_prompt": opened}
    source = fields.string("chat_template")
    if source is not None and not trust_templates:
        raise invalid("this server takes no chat_template from requests (it is a program); it would with "
                      "trust_request_chat_template", "chat_template")
    template["chat_template"] = source
    template["chat_template_kwargs"] = fields.mapping("chat_template_kwargs")
    if fields.flag("add_special_tokens"):
        raise invalid("add_special_tokens is not implemented for messages: the chat template writes them",
                      "add_special_tokens")
    return messages, template


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """A text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt must be a text, a list of token ids, or a list with at least one of these", "prompt")
    if all(_is_integer(item) for item in prompt):
        return [prompt]
    for item in prompt:
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(_is_integer, item))):
            raise invalid("each prompt must be a text or a list of token ids", "prompt")
    return prompt


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _output(fields: Fields) -> Output:
    stream, options = fields.flag("stream"), fields.mapping("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options is only allowed with stream=true", "stream_options")
    inner = Fields(options or {})
    include_usage = inner.flag("include_usage")
    inner.flag("include_obfuscation")  # padding against guessing texts from sizes; leaving it out is allowed
    try:
        inner.end()
    except Exception as error:
        raise invalid(f"stream_options: {error}", "stream_options") from None
    return Output(stream=stream, include_usage=include_usage, return_token_ids=fields.flag("return_token_ids"),
                  tokens_as_ids=fields.flag("return_tokens_as_token_ids"))


def _check_best_of(fields: Fields, sampling: dict[str, Any]) -> None:
    best_of = fields.take("best_of")
    if best_of is not None and best_of != sampling.get("n", 1):
        raise invalid("best_of other than n is not implemented", "best_of")
