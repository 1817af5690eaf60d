"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One vocabulary entry's log-probability at one position.

    Attributes:
        logprob: natural log of the probability under the model's raw logits (before temperature,
            penalties and masks).
        rank: 1 for the most probable entry.
        decoded: the entry's text, or None when `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded: str | None = None


# Keyed by token id; the sampled (or prompt) token is always among the keys, best first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    Attributes:
        index: 0 .. n-1.
        text: detokenised text so far (empty with `detokenize=False`).
        token_ids: generated ids, including the one that stopped the generation.
        finish_reason: None while running; "stop", "length", "abort" or "error" at the end.
        stop_reason: the stop string or the token id that ended it; None for EOS and for other reasons.
        cumulative_logprob: sum of the sampled tokens' logprobs; None unless `logprobs` was asked.
        logprobs: one entry a generated token; None unless `logprobs` was asked.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimings:
    """Seconds. `queue`: submission to first schedule; `first_token`: submission to first token on the
    host; `total`: submission to finish. None until known."""

    queue: float | None = None
    first_token: float | None = None
    total: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt.

    `error` is set when the request failed: the exception, with its message for the user. Then every
    completion has finish_reason "error" and the other fields hold what was known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(o.finished for o in self.outputs)

    @property
    def text(self) -> str:
        """Text of the first completion (empty for a failed request)."""
        return self.outputs[0].text if self.outputs else ""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One increment of one completion.

    Attributes:
        index: which of the request's completions.
        text: new text, never half a character; joined deltas equal the final text.
        token_ids: new ids.
        logprobs: entries for the new ids, when asked for.
        finish_reason, stop_reason: set in the completion's last event.
        output: the whole RequestOutput, only in the request's very last event.
        prompt_logprobs: of the whole prompt, when asked for; in the first event after the prompt was read,
            whichever completion it is of.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
