"""The bodies of completions, chats and of what counts tokens, checked as far as that needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.llm import Messages
from jaxserve.sampling_params import INT32_MAX, SamplingParams, shortened
from jaxserve.serving.http.errors import ApiError, invalid
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
    integer,
    is_integer,
    not_implemented,
    sampling,
)

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default

# -- kinds of fields

TOKEN_IDS_SCHEMA: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}


def _read_prompts(name: str, prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(f"{name} must be a text, a list of token ids, or a list with at least one of these, got "
                      f"{shortened(prompt)}", name)
    if all(map(is_integer, prompt)):
        return [prompt]
    for item in prompt:
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(is_integer, item))):
            raise invalid(f"each of several prompts must be a text or a list of token ids, got {shortened(item)}", name)
    return prompt


PROMPTS = Kind({"anyOf": [
    TEXT.schema, TOKEN_IDS_SCHEMA | {"minItems": 1},
    {"type": "array", "minItems": 1, "items": {"anyOf": [TEXT.schema, TOKEN_IDS_SCHEMA]}}]}, _read_prompts)


def _read_messages(name: str, messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise invalid(f"{name} must be a list with at least one message, got {shortened(messages)}", name)
    if not all(isinstance(message, Mapping) for message in messages):
        raise invalid("each message must be an object with role and content", name)
    return [spoken_as(message) for message in messages]


def spoken_as(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Developers speak as the system does: few templates know them, and some leave out whom they do not know."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


# What else a message may hold is its chat template's affair.
MESSAGES = Kind({"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role"], "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [TEXT.schema, {"type": "null"}, {"type": "array", "items": {
            "type": "object", "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": TEXT.schema}}}]}}}}, _read_messages)

# -- tables

MODEL = {"model": Field(TEXT, "The served model's name.")}
STREAM_OPTIONS = Table("StreamOptions", {
    "include_usage": Field(FLAG, "One more chunk at the end, without choices, has the usage.", False),
    "continuous_usage_stats": Field(FLAG, "With include_usage: every chunk has the usage so far.", False),
    "include_obfuscation": Field(FLAG, "Has no effect: nothing is padded.", False),
})
OUTPUT = {
    "stream": Field(FLAG, "The answer as server-sent events.", False),
    "stream_options": Field(STREAM_OPTIONS.kind, "Only with stream."),
    "return_token_ids": Field(FLAG, "The ids of prompt and completion too.", False),
    "return_tokens_as_token_ids": Field(FLAG, 'Tokens in logprobs are shown as "token_id:7".', False),
}
TEMPLATE = {
    "add_generation_prompt": Field(
        FLAG, "End the prompt where the assistant begins to speak. Default: yes, unless continue_final_message."),
    "continue_final_message": Field(FLAG, "The last message is the beginning of the answer.", False),
    "chat_template": Field(TEXT, "A Jinja template instead of the model's; the server may not allow it."),
    "chat_template_kwargs": Field(OBJECT, "Variables for the template."),
}
# Labels and the client's own bookkeeping; they change nothing in an answer.
BOOKKEEPING = {
    "user": Field(TEXT, "Has no effect."), "metadata": Field(LABELS, "Has no effect."),
    "safety_identifier": Field(TEXT, "Has no effect."), "prompt_cache_key": Field(TEXT, "Has no effect."),
    "prompt_cache_retention": Field(TEXT, "Has no effect."),
}
# Fields of OpenAI and vLLM, with the values that ask for nothing.
NOT_IMPLEMENTED = {name: not_implemented(*neutral) for name, neutral in {
    "audio": (), "prediction": (), "web_search_options": (), "verbosity": ("medium",), "modalities": (["text"],),
    "store": (False,), "service_tier": ("auto", "default"), "suffix": ("",), "moderation": (),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (), "structural_tag": (),
    "reasoning_effort": (), "include_reasoning": (True,), "thinking_token_budget": (),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "repetition_detection": (), "stream_interval": (1,),
    "logprob_token_ids": ([],), "kv_transfer_params": (), "documents": ([],), "mm_processor_kwargs": (),
}.items()}

COMPLETION = Table("CompletionRequest", MODEL, {
    "prompt": Field(PROMPTS, "A text, its token ids, or a list of these.", required=True),
}, SAMPLING, {
    "max_tokens": Field(SAMPLING["max_tokens"].kind, f"Default {DEFAULT_COMPLETION_TOKENS}, or what is left of the "
                                                     f"context if that is less. 0 only with echo."),
    "echo": Field(FLAG, "The text begins with the prompt, and so do the logprobs.", False),
    "best_of": Field(integer(1), "Only the value of n."),
    "add_special_tokens": Field(FLAG, "Begin with the tokens that the tokenizer begins with.", True),
    "truncate_prompt_tokens": Field(integer(-1), "Keep so many of the prompt's last tokens; -1: as many as fit."),
}, OUTPUT, BOOKKEEPING, NOT_IMPLEMENTED)

CHAT = Table("ChatRequest", MODEL, {
    "messages": Field(MESSAGES, "The conversation.", required=True),
}, SAMPLING, {
    "max_tokens": Field(integer(1), "The older name of max_completion_tokens."),
    "max_completion_tokens": Field(integer(1), "Default: the rest of the context."),
    "logprobs": Field(FLAG, "The log-probabilities of the answer's tokens.", False),
    "top_logprobs": Field(integer(0), "With logprobs: of so many of the best tokens too.", 0),
    "add_special_tokens": not_implemented(False),  # the template writes them
}, TEMPLATE, OUTPUT, BOOKKEEPING, NOT_IMPLEMENTED)

TOKENIZE = Table("TokenizeRequest", MODEL, {
    "prompt": Field(TEXT, "The text. Either this, or messages."),
    "messages": Field(MESSAGES, "A conversation."),
    "add_special_tokens": Field(FLAG, "Default: true for a text, false for messages."),
    "return_token_strs": Field(FLAG, "The tokenizer's own names of the tokens too.", False),
}, TEMPLATE)

DETOKENIZE = Table("DetokenizeRequest", MODEL, {
    "tokens": Field(Kind(TOKEN_IDS_SCHEMA, lambda _, value: value), "Ids.", required=True),
})

# -- requests


@dataclass(frozen=True, kw_only=True)
class Output:
    """How an answer is to look.

    Attributes:
        stream: as server-sent events.
        include_usage: in a stream, an event with the usage at the end.
        continuous_usage: and the usage so far in each event.
        return_token_ids: also as ids.
        tokens_as_ids: in logprobs, tokens are "token_id:7" and not text.
    """

    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False


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
    """`template`: the options of LLM.chat. `names`: of the fields that the client gave for others of `params`."""

    messages: Messages
    params: SamplingParams
    template: dict[str, Any]
    names: dict[str, str]
    output: Output


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """Either `prompt` or `messages`."""

    prompt: str | None
    messages: Messages | None
    template: dict[str, Any]
    add_special_tokens: bool
    names: bool


def completion_request(body: Any, model: str) -> CompletionRequest:
    """Raises ApiError, RequestError."""
    values = COMPLETION.read(body)
    check_model(values["model"], model)
    output, given = _output(values), sampling(values)
    echo, max_tokens, logprobs = values["echo"], values["max_tokens"], values["logprobs"]
    if values["best_of"] not in (None, given.get("n", 1)):
        raise invalid(f"best_of other than n is not implemented, got {values['best_of']}", "best_of")
    if values["truncate_prompt_tokens"] == 0:
        raise invalid("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens")
    if output.stream and "prompt_logprobs" in given:
        raise invalid("prompt_logprobs cannot be streamed; use echo with logprobs, or stream=false", "prompt_logprobs")
    if echo and "prompt_logprobs" not in given and (logprobs is not None or max_tokens == 0):
        given["prompt_logprobs"] = 0 if logprobs is None else logprobs
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens must be at least 1, got 0; 0 is only allowed with echo", "max_tokens")
    return CompletionRequest(
        prompts=values["prompt"], params=SamplingParams(**given), max_tokens=max_tokens, echo=echo,
        add_special_tokens=values["add_special_tokens"], truncate=values["truncate_prompt_tokens"], output=output)


def chat_request(body: Any, model: str, *, trust_templates: bool) -> ChatRequest:
    """Raises ApiError, RequestError."""
    values = CHAT.read(body)
    check_model(values["model"], model)
    output, given = _output(values), sampling(values)
    # The newer name counts if both are given.
    given["max_tokens"] = values["max_completion_tokens"] or values["max_tokens"]
    names = {"logprobs": "top_logprobs"}
    if values["max_completion_tokens"] is not None:
        names["max_tokens"] = "max_completion_tokens"
    if not values["logprobs"] and values["top_logprobs"]:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    given["logprobs"] = values["top_logprobs"] if values["logprobs"] else None
    if output.stream and "prompt_logprobs" in given:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    return ChatRequest(messages=values["messages"], params=SamplingParams(**given),
                       template=_template(values, trust_templates), names=names, output=output)


def tokenize_request(body: Any, model: str, *, trust_templates: bool) -> TokenizeRequest:
    """Raises ApiError."""
    values = TOKENIZE.read(body)
    check_model(values["model"], model)
    if (values["prompt"] is None) == (values["messages"] is None):
        raise invalid("give either a prompt, which is a text, or messages", "prompt")
    chat = values["messages"] is not None
    special = not chat if values["add_special_tokens"] is None else values["add_special_tokens"]
    if chat and special:
        raise invalid("add_special_tokens is not implemented for messages: the chat template writes them",
                      "add_special_tokens")
    given = [name for name, field in TEMPLATE.items() if values[name] != field.default]
    if not chat and given:
        raise invalid(f"{given[0]} is only allowed with messages", given[0])
    return TokenizeRequest(prompt=values["prompt"], messages=values["messages"],
                           template=_template(values, trust_templates), add_special_tokens=special,
                           names=values["return_token_strs"])


def detokenize_request(body: Any, model: str) -> Any:
    """The ids, unchecked. Raises ApiError."""
    values = DETOKENIZE.read(body)
    check_model(values["model"], model)
    return values["tokens"]


def check_model(name: str | None, served: str) -> None:
    """The name may be left out. Raises ApiError (404) for another one."""
    if name is not None and name != served:
        raise ApiError(404, f"the model {shortened(name)} does not exist; this server has {served!r}", param="model",
                       code="model_not_found")


def _template(values: Mapping[str, Any], trust_templates: bool) -> dict[str, Any]:
    """The options of LLM.chat that render the messages."""
    continued, opened = values["continue_final_message"], values["add_generation_prompt"]
    if continued and opened:
        raise invalid("add_generation_prompt and continue_final_message exclude each other; set one of them",
                      "continue_final_message")
    if values["chat_template"] is not None and not trust_templates:
        raise invalid("this server takes no chat_template from requests (it is a program); it would with "
                      "trust_request_chat_template", "chat_template")
    return {name: values[name] for name in TEMPLATE}


def _output(values: Mapping[str, Any]) -> Output:
    options = values["stream_options"]
    if options is not None and not values["stream"]:
        raise invalid("stream_options is only allowed with stream=true", "stream_options")
    options = options or {"include_usage": False, "continuous_usage_stats": False}
    if options["continuous_usage_stats"] and not options["include_usage"]:
        raise invalid("continuous_usage_stats needs include_usage=true", "stream_options.continuous_usage_stats")
    return Output(stream=values["stream"], include_usage=options["include_usage"],
                  continuous_usage=options["continuous_usage_stats"], return_token_ids=values["return_token_ids"],
                  tokens_as_ids=values["return_tokens_as_token_ids"])
