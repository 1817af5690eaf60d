"""What users hand to `generate` and `chat`, made into lists: common to the offline LLM and the clients."""

from __future__ import annotations

import numbers
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError, unknown_names
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether there is only one, given on its own."""
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if isinstance(prompts, bytes | bytearray):
        raise RequestError("a prompt is text or token ids, got bytes; decode them first", "prompts")
    if isinstance(prompts, set | frozenset):
        raise RequestError(f"prompts must be in an order, got a {type(prompts).__name__}; give a list", "prompts")
    # An array's tolist gives plain integers; a jax array's own items would be arrays.
    to_list = getattr(prompts, "tolist", None)
    items = prompts if to_list is None else to_list()
    if not isinstance(items, Iterable):  # a single number, or an array of no dimensions
        raise RequestError(f"prompts must be a prompt or a list of prompts, got {prompts!r:.80}; a single token id is "
                           "a prompt in a list", "prompts")
    items = list(items)
    if items and all(isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in items):
        return [items], True
    return items, False


def listed_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations as a list, and whether there is only one, given on its own. An empty list is no conversation,
    as an empty list of prompts is no prompt."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages or a list of such lists, got "
                           f"{type(messages).__name__}", "messages")
    items = list(messages)
    if items and isinstance(items[0], Mapping):
        return [items], True
    return items, False


def one_prompt(prompt: Any) -> Any:
    """The prompt of a stream, which takes one. Raises RequestError for several."""
    items, single = listed_prompts(prompt)
    if not single and any(isinstance(item, str | Mapping | Sequence) for item in items):
        raise RequestError(f"a stream takes one prompt, got a list of {len(items)}; start a stream for each, or give "
                           "the list to generate", "prompt")
    return items[0] if single else items


def one_conversation(messages: Any) -> Any:
    """As `one_prompt`, of conversations."""
    items, single = listed_conversations(messages)
    if not single and any(isinstance(item, Sequence) and not isinstance(item, str) for item in items):
        raise RequestError(f"a stream takes one conversation, got a list of {len(items)}; start a stream for each, or "
                           "give the list to chat", "messages")
    return items[0] if single else items


def _check_not_both(params: Any, sampling: dict[str, Any]) -> None:
    if params is not None and sampling:
        raise RequestError(f"give sampling_params or single sampling options ({', '.join(sorted(sampling))}), not both",
                           "sampling_params")


def one_params(params: Any, sampling: dict[str, Any]) -> SamplingParams:
    _check_not_both(params, sampling)
    if params is not None:
        return _checked_params(params)
    unknown = sorted(set(sampling) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise RequestError(unknown_names("sampling option(s)", unknown, SamplingParams.__dataclass_fields__),
                           unknown[0])
    return SamplingParams(**sampling)


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None,
                sampling: dict[str, Any]) -> list[SamplingParams]:
    if params is None or not isinstance(params, Sequence):
        return [one_params(params, sampling)] * count
    _check_not_both(params, sampling)
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one each",
                           "sampling_params")
    return [_checked_params(item) for item in params]


def _checked_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")
    return params


def failed_output(prompt: Any, error: RequestError) -> RequestOutput:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(request_id=new_request_id(), prompt=text if isinstance(text, str) else None,
                         prompt_token_ids=[], outputs=[CompletionOutput(index=0, finish_reason="error")], error=error)


def new_request_id() -> str:
    return uuid.uuid4().hex


def progress_bar(total: int, show: bool = True, **look: Any) -> Any:
    """A tqdm bar with the `look` that tqdm's options give it, shown in a terminal or a notebook: in a pipe or a log
    file it would be a line without end."""
    from tqdm.auto import tqdm

    seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    look = {"desc": "Generating", "unit": "req", "dynamic_ncols": True} | look
    return tqdm(total=total, disable=not (show and seen and total), **look)
