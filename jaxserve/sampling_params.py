"""SamplingParams: how one request is sampled and when it stops."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import RequestError, unknown_names

GREEDY_TEMPERATURE = 1e-5  # below it the distribution is a point for any logits that float32 can tell apart
MAX_N = 128
MAX_LOGIT_BIAS = 512
MAX_BAD_WORDS = 128          # token sequences, after spelling variants
MAX_BAD_WORD_TOKENS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_END_IDS = MAX_STOP_TOKEN_IDS + 16  # stop_token_ids and the model's EOS ids
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_CACHE_SALT_CHARS = 1024
INT32_MAX = 2**31 - 1
MAX_ABS_LOGIT_BIAS = 100.0
FACTOR_LIMIT = 1e4  # of temperature and repetition_penalty: scaled logits stay finite in float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request. None for a sampling field means: the checkpoint's
    generation_config if it names one, else the neutral value.

    Attributes:
        n: completions per prompt, each with its own random stream.
        max_tokens: most tokens to generate; None: the rest of the context. Larger than what is left of
            the context is an error. 0 only with prompt_logprobs, to score the prompt: the completion is
            empty and ends with "length" (the engine samples one token and drops it).
        min_tokens: EOS and stop_token_ids cannot be sampled before this many tokens, and stop strings
            that they complete do not count.
        temperature: 0 (or below 1e-5) is greedy, at most 1e4. Neutral 1.
        top_k: keep the k most probable; 0, -1 or more than the vocabulary: off.
        top_p: keep the smallest set with this probability mass, in (0, 1].
        min_p: drop entries below this share of the best probability, in [0, 1].
        repetition_penalty: in [1e-4, 1e4]; divides positive and multiplies negative logits of ids in
            prompt or output. Neutral 1.
        presence_penalty, frequency_penalty: in [-2, 2]; over generated ids only.
        logit_bias: id -> value in [-100, 100], added to the logits.
        allowed_token_ids: every other id is masked. Empty is an error.
        bad_words: string or strings whose tokens must not appear in a row (as the word is encoded with and
            without a leading space; other splits of the same letters, and longer words' tokens, are not banned).
        stop: string or strings that end the generation; matched on generated text only. The one that is
            completed first counts, of several the longest.
        stop_token_ids: ids that end the generation. Such an id stays in token_ids, its text is left out
            (as that of EOS).
        include_stop_str_in_output: keep the matched stop string in the text, and the text of an EOS or
            stop id (still subject to skip_special_tokens).
        ignore_eos: do not stop at EOS.
        seed: 64 bits, with or without a sign; the request's random numbers depend on (seed, completion index,
            position) and on nothing else. The logits' last bits may still differ with what runs beside it, in
            bfloat16 enough to change a token now and then; the engine option `deterministic` excludes that.
        logprobs: return the k best log-probabilities of each generated position, and the sampled one's: those
            of the model, before temperature, penalties, bias and filters.
        prompt_logprobs: the same for prompt positions (the first has none).
        detokenize: False: no text, so no stop strings either.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between adjacent special tokens that are shown.
        priority: lower runs first; needs scheduling_policy="priority" if not 0.
        cache_salt: requests share prefix pages only with requests of the same salt.

    Unknown names raise TypeError, wrong values RequestError. Empty collections mean the same as None,
    except for allowed_token_ids. What depends on the model (ids, lengths, `max_logprobs`) is checked when
    the request is submitted.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def __new__(cls, **fields: Any) -> SamplingParams:
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            raise TypeError(unknown_names("sampling option(s)", unknown, cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            self._set(name, _integer(name, getattr(self, name), low, high))
        for name, (low, high) in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), low, high))
        for name, (low, high) in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), low, high))
        for name, (low, high) in _OPTIONAL_NUMBERS.items():
            if getattr(self, name) is not None:
                self._set(name, _number(name, getattr(self, name), low, high))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}", name)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0, got 0", "top_p")
        self._check_ids()
        self._check_strings()
        self._check_lengths()

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ids(self) -> None:
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids",
                      check_token_ids("allowed_token_ids", self.allowed_token_ids, in_order=False))
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could be generated; leave it out to allow all",
                    "allowed_token_ids")
        if self.stop_token_ids is not None:
            ids = check_token_ids("stop_token_ids", self.stop_token_ids, in_order=False)
            if len(ids) > MAX_STOP_TOKEN_IDS:
                raise RequestError(
                    f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed", "stop_token_ids")
            self._set("stop_token_ids", ids)

    def _check_strings(self) -> None:
        if self.stop is not None:
            stops = _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
            if len(stops) > MAX_STOP_STRINGS:
                raise RequestError(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
            longest = max(map(len, stops), default=0)
            if longest > MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"a stop string has {longest} characters, at most {MAX_STOP_STRING_CHARS} are allowed", "stop")
            if stops and not self.detokenize:
                raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", "stop")
            self._set("stop", stops)
        if self.bad_words is not None:
            words = _strings("bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words)
            if len(words) > MAX_BAD_WORDS:
                raise RequestError(
                    f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are allowed", "bad_words")
            self._set("bad_words", words)
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
            if not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
                raise RequestError(
                    f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters, got {len(self.cache_salt)}",
                    "cache_salt")

    def _check_lengths(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens must be at least 1, got 0; 0 is only allowed together with prompt_logprobs", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}", "min_tokens")


_INTEGERS = {
    "n": (1, MAX_N),
    "min_tokens": (0, INT32_MAX),
    "priority": (-INT32_MAX, INT32_MAX),
}
_OPTIONAL_INTEGERS = {
    "max_tokens": (0, INT32_MAX),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, INT32_MAX),
    "prompt_logprobs": (0, INT32_MAX),
}
_NUMBERS = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_OPTIONAL_NUMBERS = {
    "temperature": (0.0, FACTOR_LIMIT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1 / FACTOR_LIMIT, FACTOR_LIMIT),
}
# Lowest and highest value of every field that is a number.
RANGES: Mapping[str, tuple[float, float]] = _INTEGERS | _OPTIONAL_INTEGERS | _NUMBERS | _OPTIONAL_NUMBERS
_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")


def check_text(param: str, value: object) -> str:
    """Returns `value` if it is a string that UTF-8 can hold; RequestError otherwise."""
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string, got {shortened(value)}", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds a lone surrogate at character {error.start}; text must be valid Unicode", param) from None
    return value


def check_token_ids(param: str, value: object, *, in_order: bool = True) -> tuple[int, ...]:
    """Returns `value` as a tuple of ids >= 0, from a sequence or an array of integers, or, where their order does not
    matter, from any sized collection of them; RequestError otherwise."""
    to_list = getattr(value, "tolist", None)  # an array's; a jax array's own items would be arrays
    value = value if to_list is None else to_list()
    if not isinstance(value, Sequence if in_order else Collection) or isinstance(value, str | bytes | Mapping):
        raise RequestError(f"{param} must be a list of token ids, got {shortened(value)}", param)
    ids = tuple(value)
    if not all(type(i) is int for i in ids):  # the usual case costs no call per id: prompts are long
        ids = tuple(_integer(f"each id of {param}", i, 0, INT32_MAX, param) for i in ids)
    if ids and (min(ids) < 0 or max(ids) > INT32_MAX):
        wrong = next(i for i in ids if not 0 <= i <= INT32_MAX)
        raise RequestError(f"each id of {param} must be an integer from 0 to {INT32_MAX}, got {wrong}", param)
    return ids


def _integer(name: str, value: object, low: int, high: int, param: str | None = None) -> int:
    # numpy's integers are welcome; bool is an int only by history.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {shortened(value)}", param or name)
    return int(value)


def _number(name: str, value: object, low: float, high: float) -> float:
    number = math.nan  # in no range
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond any float
            number = math.inf
    if not low <= number <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {shortened(value)}", name)
    return number


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shortened(value)}", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed", "logit_bias")
    ids = check_token_ids("logit_bias", list(value))
    limit = MAX_ABS_LOGIT_BIAS
    return {i: _number("logit_bias", bias, -limit, limit) for i, bias in zip(ids, value.values(), strict=True)}


def _strings(param: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{param} must be a list of strings, got {shortened(value)}", param)
    texts = tuple(check_text(param, text) for text in value)
    if "" in texts:
        raise RequestError(f"{param} holds an empty string, which would match everywhere; leave it out", param)
    return texts


def shortened(value: object) -> str:
    """A user's value for a message: a huge one must not fill the log."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
