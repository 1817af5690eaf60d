"""Reading a JSON body field by field. Every field is taken or refused: none is ignored by accident."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.http.errors import ApiError, invalid

# Fields that change nothing in an answer here, whatever they hold: labels and the client's own bookkeeping.
_LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Fields of OpenAI and vLLM that are not implemented, with the values that ask for nothing.
_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "prediction": (), "web_search_options": (), "verbosity": ("medium",), "modalities": (["text"],),
    "store": (False,), "service_tier": ("auto", "default"), "suffix": ("",), "moderation": (),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (), "structural_tag": (),
    "reasoning_effort": (), "include_reasoning": (True,), "thinking_token_budget": (),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "repetition_detection": (), "stream_interval": (1,),
    "logprob_token_ids": ([],), "kv_transfer_params": (), "documents": ([],), "mm_processor_kwargs": (),
}
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__) - {"max_tokens", "logprobs", "detokenize"}


def parse_json(body: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        return json.loads(body, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class Fields:
    """The fields of a JSON object. null is the same as absent. Raises ApiError (400), naming the field."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        self._left: dict[str, Any] = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        """The value of any type."""
        return self._left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false", name)
        return value

    def integer(self, name: str, low: int) -> int | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise invalid(f"{name} must be an integer of at least {low}", name)
        return value

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name} must be a string", name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{name} must be an object", name)
        return value

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that mean the same here as there; their values are checked by it."""
        given = {name: self._left.pop(name) for name in _SAMPLING & self._left.keys()}
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = {_token_id(key): value for key, value in given["logit_bias"].items()}
        return given

    def model(self, served: str) -> None:
        """Takes the model's name, which may be left out. Raises ApiError (404) for another one."""
        name = self.string("model")
        if name is not None and name != served:
            raise unknown_model(name, served)

    def end(self) -> None:
        """Refuses what nobody has taken."""
        for name, value in self._left.items():
            if name in _LABELS:
                continue
            if name not in _NOT_IMPLEMENTED:
                raise invalid(f"unknown field {name!r}", name)
            if not any(type(value) is type(neutral) and value == neutral for neutral in _NOT_IMPLEMENTED[name]):
                raise invalid(f"{name} is not implemented; leave it out", name)


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(404, f"the model {name!r} does not exist; this server has {served!r}", param="model",
                    code="model_not_found")


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise invalid(f"the keys of logit_bias must be token ids, got {key!r}", "logit_bias")
    return int(key)
