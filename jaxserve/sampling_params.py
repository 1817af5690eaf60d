"""SamplingParams: how one request is sampled and when it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from jaxserve.errors import RequestError

GREEDY_TEMPERATURE = 1e-5  # below it the distribution is a point for any logits that float32 can tell apart
MAX_N = 128
MAX_LOGIT_BIAS = 512
MAX_BAD_WORDS = 128          # token sequences, after spelling variants
MAX_BAD_WORD_TOKENS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_CACHE_SALT_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request. None for a sampling field means: the checkpoint's
    generation_config if it names one, else the neutral value.

    Attributes:
        n: completions per prompt, each with its own random stream.
        max_tokens: most tokens to generate; None: the rest of the context. Larger than what is left of
            the context is an error.
        min_tokens: EOS and stop_token_ids cannot be sampled before this many tokens.
        temperature: 0 (or below 1e-5) is greedy. Neutral 1.
        top_k: keep the k most probable; 0, -1 or more than the vocabulary: off.
        top_p: keep the smallest set with this probability mass, in (0, 1].
        min_p: drop entries below this share of the best probability, in [0, 1].
        repetition_penalty: > 0; divides positive and multiplies negative logits of ids in prompt or output.
        presence_penalty, frequency_penalty: in [-2, 2]; over generated ids only.
        logit_bias: id -> value in [-100, 100], added to the logits.
        allowed_token_ids: every other id is masked.
        bad_words: strings that must not appear (with and without a leading space).
        stop: string or strings that end the generation; matched on generated text only.
        stop_token_ids: ids that end the generation.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: do not stop at EOS.
        seed: makes the request's samples reproducible; they depend on (seed, completion index, position).
        logprobs: return the k best log-probabilities of each generated position, and the sampled one's.
        prompt_logprobs: the same for prompt positions (the first has none).
        detokenize: False: no text, so no stop strings either.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between adjacent special tokens that are shown.
        priority: lower runs first; needs scheduling_policy="priority" if not 0.
        cache_salt: requests share prefix pages only with requests of the same salt.
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
    bad_words: Sequence[str] | None = None
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
