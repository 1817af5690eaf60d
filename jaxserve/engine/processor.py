"""From a user's prompt and SamplingParams to a request that the engine can run without further checks.

Everything is validated here, on the host: gathers on the device clamp wrong ids silently.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import ResolvedConfig
from jaxserve.engine.request import SequenceOptions
from jaxserve.errors import ConfigError, RequestError
from jaxserve.models.hf_config import get_token_ids
from jaxserve.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    SamplingParams,
    check_text,
    check_token_ids,
)
from jaxserve.text_length import num_chars

Prompt = str | Sequence[int] | Mapping[str, Any]

# A text of this length is looked at whatever comes of it: about half a second of encoding.
CHEAP_CHARS = 1 << 20
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class PromptTokenizer(Protocol):
    """What it takes to make prompts and to check options."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def chars_per_token(self) -> int: ...

    def least_tokens(self, text: str) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A valid request.

    Attributes:
        prompt: the text, or None for a prompt of ids.
        prompt_token_ids: at least one, all below the vocabulary size, fewer than max_model_len.
        params: as given, except that `detokenize` is False when the engine has no tokenizer.
        options: one a completion; they differ in their seed.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    options: tuple[SequenceOptions, ...]


def eos_token_ids(
    tokenizer: PromptTokenizer | None,
    generation_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    vocab_size: int,
) -> frozenset[int]:
    """Every id that ends a text: the tokenizer's, generation_config.json's and config.json's together.

    Chat models often name different ones in the three places, each for a reason. Values are an id, a list
    of ids, or null. Ids that the model has no row for are left out.
    """
    found = set(tokenizer.eos_ids) if tokenizer is not None else set()
    found.update(get_token_ids(generation_config, "eos_token_id", "generation_config"),
                 get_token_ids(model_config, "eos_token_id"))
    return frozenset(i for i in found if 0 <= i < vocab_size)


class Processor:
    """Validates requests and resolves their defaults. Safe to call from several threads.

    Args:
        tokenizer: None for a model without one: prompts are ids then, and there is no text.
        config: the engine's limits.
        eos_ids: see `eos_token_ids`.
        generation_config: sampling defaults of the checkpoint (temperature, top_k, top_p, min_p,
            repetition_penalty; `do_sample: false` stands for temperature 0). Its lengths are ignored.
            Pass {} when `use_generation_config` is off.
        base_seed: of the seeds of requests without one. None: from the operating system.

    Raises ConfigError when generation_config holds a value that no request may have.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer | None,
        config: ResolvedConfig,
        eos_ids: frozenset[int],
        generation_config: Mapping[str, Any],
        base_seed: int | None,
    ):
        self._tokenizer = tokenizer
        self._config = config
        self._num_tokens = config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, config.vocab_size)
        self.eos_ids = eos_ids
        self.defaults = _sampling_defaults(generation_config)
        self._base_seed = secrets.randbits(64) if base_seed is None else base_seed
        self._counter = itertools.count()

    def process(self, prompt: Prompt, params: SamplingParams) -> ProcessedRequest:
        """Checks one prompt and its params against the model and the engine.

        `prompt`: a string (the tokenizer adds its BOS), a list of ids (taken as they are), or a dict with
        the one key "prompt" or "prompt_token_ids". Raises RequestError.
        """
        text, ids = self._prompt_ids(prompt)
        if self._tokenizer is None:
            params = self._without_text(params)
        max_tokens = self._check_lengths(len(ids), params)
        self._check_limits(params)
        shared = self._shared_options(params, max_tokens)
        seeds = self._seeds(params)
        return ProcessedRequest(text, ids, params, tuple(SequenceOptions(seed=seed, **shared) for seed in seeds))

    def _prompt_ids(self, prompt: object) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
                raise RequestError(
                    'a prompt given as a dict has the one key "prompt" or "prompt_token_ids", got the keys '
                    f"{sorted(map(str, prompt))}", "prompt")
            (key, prompt), = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                raise RequestError(
                    '"prompt" takes a string and "prompt_token_ids" a list of ids, got '
                    f"{type(prompt).__name__} for {key!r}", "prompt")
        if not isinstance(prompt, str):
            if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
                self._check_room(f"{len(prompt)} tokens", len(prompt), "prompt")  # before each of them is looked at
            ids = list(check_token_ids("prompt", prompt))
            if not ids:
                raise RequestError("the prompt is empty; give at least one token id", "prompt")
            self._check_vocabulary("prompt", ids)
            return None, ids
        check_text("prompt", prompt)
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer, so the prompt must be a list of token ids", "prompt")
        ids = self.encode(prompt)
        if not ids:
            raise RequestError("the prompt is empty, and the tokenizer adds no token to an empty text", "prompt")
        self._check_vocabulary("prompt", ids)
        return prompt, ids

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt",
               must_fit: bool = True) -> list[int]:
        """Ids of a text. One that can never be a prompt is refused by its length, before it costs time and memory;
        without `must_fit` only if it is longer than CHEAP_CHARS too. Raises RequestError, naming `param`."""
        assert self._tokenizer is not None
        least = self._tokenizer.least_tokens(text)
        if must_fit:
            self._check_room(f"{len(text)} characters, which are at least {least} tokens", least, param)
        elif len(text) > CHEAP_CHARS and least >= self._config.max_model_len:
            raise RequestError(
                f"the text has {len(text)} characters; of a text that is longer than max_model_len "
                f"({self._config.max_model_len} tokens) at most {CHEAP_CHARS} characters are taken at a time, so send "
                "it in pieces", param)
        return self._tokenizer.encode(text, add_special_tokens, param)

    def check_conversation(self, messages: object) -> None:
        """As `encode`, for all that a chat template is given, before it is rendered. A template may leave much of it
        out, so only what is neither cheap nor fits is refused. Raises RequestError."""
        assert self._tokenizer is not None
        limit = max(CHEAP_CHARS, self._config.max_model_len * self._tokenizer.chars_per_token)
        if num_chars(messages, limit) > limit:
            raise RequestError(
                f"the messages have more than {limit} characters, but max_model_len is {self._config.max_model_len}; "
                "shorten them or raise max_model_len", "messages")

    def _check_vocabulary(self, param: str, ids: Collection[int]) -> None:
        if ids and max(ids) >= self._config.vocab_size:
            raise RequestError(
                f"{param} holds the token id {max(ids)}, but the model's ids end at {self._config.vocab_size - 1}",
                param)

    def _without_text(self, params: SamplingParams) -> SamplingParams:
        for param, value in (("stop", params.stop), ("bad_words", params.bad_words)):
            if value:
                raise RequestError(f"{param} needs a tokenizer, and the model has none; use token ids", param)
        return params.clone(detokenize=False)

    def _check_lengths(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns how many tokens to generate at most."""
        limit = self._config.max_model_len
        left = limit - prompt_len
        self._check_room(f"{prompt_len} tokens", prompt_len, "prompt")
        if params.max_tokens is not None and params.max_tokens > left:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but a prompt of {prompt_len} tokens leaves {left} of "
                f"max_model_len {limit}; lower it or leave it out to use the rest", "max_tokens")
        # Scoring (max_tokens=0) runs as one token, which the output leaves out.
        max_tokens = left if params.max_tokens is None else max(params.max_tokens, 1)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but a prompt of {prompt_len} tokens leaves {left} of "
                f"max_model_len {limit}", "min_tokens")
        return max_tokens

    def _check_room(self, size: str, least_tokens: int, param: str) -> None:
        limit = self._config.max_model_len
        if least_tokens >= limit:
            raise RequestError(
                f"the prompt has {size}, but max_model_len is {limit}, which leaves room for a prompt of at most "
                f"{limit - 1}; shorten it or raise max_model_len", param)

    def _check_limits(self, params: SamplingParams) -> None:
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(params, param)
            limit = min(self._config.max_logprobs, self._config.vocab_size)
            if value is not None and value > limit:
                raise RequestError(
                    f"{param} is {value}, at most {limit} are allowed; see the engine option max_logprobs", param)
        if params.priority != 0 and self._config.scheduling_policy != "priority":
            raise RequestError(
                f'priority is {params.priority}, but the engine runs with scheduling_policy="fcfs"; start it with '
                'scheduling_policy="priority" or leave priority at 0', "priority")
        for param in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_vocabulary(param, getattr(params, param) or ())

    def _shared_options(self, params: SamplingParams, max_tokens: int) -> dict[str, Any]:
        """Everything of SequenceOptions but the seed."""
        sampling = {name: self.defaults[name] if (value := getattr(params, name)) is None else value
                    for name in NEUTRAL}
        if sampling["temperature"] < GREEDY_TEMPERATURE:
            # Greedy: the filters keep the best token whatever they are, so they are not run at all.
            sampling |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if not 0 < sampling["top_k"] < self._config.vocab_size:
            sampling["top_k"] = 0
        options = sampling | {
            "max_tokens": max_tokens,
            "min_tokens": params.min_tokens,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias": tuple(sorted((params.logit_bias or {}).items())),
            "allowed_token_ids":
                None if params.allowed_token_ids is None else tuple(sorted(set(params.allowed_token_ids))),
            "bad_words": self._bad_words(params.bad_words or ()),
            "eos_ids": frozenset() if params.ignore_eos else self.eos_ids,
            "stop_ids": frozenset(params.stop_token_ids or ()),
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
            "priority": params.priority,
            "cache_salt": params.cache_salt,
        }
        num_end_ids = len(options["eos_ids"] | options["stop_ids"])
        if num_end_ids > MAX_END_IDS:
            raise RequestError(f"stop_token_ids and the model's EOS ids are {num_end_ids} together, at most "
                               f"{MAX_END_IDS} are allowed", "stop_token_ids")
        _check_something_is_allowed(options, self._num_tokens)
        return options

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell the words: at the start of a text, after a space, inside a word."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            assert self._tokenizer is not None  # _without_text has refused bad_words otherwise
            if self._tokenizer.least_tokens(bare) > MAX_BAD_WORD_TOKENS:
                raise RequestError(f"an entry of bad_words has {len(word)} characters, which are more than the "
                                   f"{MAX_BAD_WORD_TOKENS} tokens that are allowed", "bad_words")
            for ids in (self._encode(bare), self._encode(" " + bare), self._encode_inside(bare)):
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"an entry of bad_words has {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
                        "bad_words")
                if ids:
                    self._check_vocabulary("bad_words", ids)
                    spellings[ids] = None
        if len(spellings) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(spellings)} spellings, at most {MAX_BAD_WORDS} are allowed", "bad_words")
        return tuple(spellings)

    def _encode(self, text: str) -> tuple[int, ...]:
        assert self._tokenizer is not None  # _without_text has refused bad_words otherwise
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_inside(self, word: str) -> tuple[int, ...]:
        """The word's ids directly behind a newline: sentencepiece puts a space before a text's first word,
        so its spelling without one only shows behind something else."""
        newline, ids = self._encode("\n"), self._encode("\n" + word)
        return ids[len(newline):] if ids[:len(newline)] == newline else ()

    def _seeds(self, params: SamplingParams) -> list[int]:
        """A 64-bit seed for each completion. Unseeded requests differ from each other and from all seeded
        ones, yet repeat with the engine's seed and the order of submission."""
        if params.seed is not None:
            source = f"request {params.seed % 2**64}"  # its 64 bits: protocols differ in whether they have a sign
        else:
            source = f"engine {self._base_seed} {next(self._counter)}"
        return [_hash64(f"{source} {index}") for index in range(params.n)]


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The neutral values, replaced by what the checkpoint names."""
    named = {name: generation_config[name] for name in NEUTRAL if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        named["temperature"] = 0.0
    try:
        checked = SamplingParams(**named)
    except RequestError as error:
        raise ConfigError(
            f"the checkpoint's generation_config is invalid ({error}); start with use_generation_config=False"
        ) from error
    return NEUTRAL | {name: getattr(checked, name) for name in named}


def _check_something_is_allowed(options: Mapping[str, Any], num_tokens: int) -> None:
    """Masks may not leave a position without any token: its distribution would be NaN.

    `num_tokens`: ids of the tokenizer; rows of the embedding beyond them are never sampled.
    """
    allowed = options["allowed_token_ids"]
    masked = {word[0] for word in options["bad_words"] if len(word) == 1}
    if options["min_tokens"] > 0:
        masked |= options["eos_ids"] | options["stop_ids"]
    candidates = range(num_tokens) if allowed is None else (i for i in allowed if i < num_tokens)
    if all(i in masked for i in candidates):
        raise RequestError(
            f"no token is left to generate: allowed_token_ids, bad_words and min_tokens {options['min_tokens']} (until "
            f"which EOS and stop_token_ids are masked) exclude every id, the tokenizer's ids being 0 to "
            f"{num_tokens - 1}", "bad_words" if allowed is None else "allowed_token_ids")
