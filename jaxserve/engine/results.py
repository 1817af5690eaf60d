"""What one step brought to the host, as plain numpy."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np


class Fault(enum.IntEnum):
    """Why a row has no id; it stands in the id's place. 0 and above are ids."""

    NOT_FINITE = -1    # the logits hold NaN or +inf, or nothing finite
    NOTHING_LEFT = -2  # the request's own masks exclude every id


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Raw log-probabilities of n positions. k is the engine's max_logprobs.

    Attributes:
        token_logprob: f32[n], of the sampled (or the prompt's) token.
        token_rank: i32[n], 1 for the most probable.
        top_ids: i32[n, k], best first; top_logprobs: f32[n, k].
    """

    token_logprob: np.ndarray
    token_rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(slots=True)
class StepResult:
    """Results by seq_id.

    Attributes:
        token_ids: ids of rows that sampled, one a decode step; none from a fault on.
        failed: why the ids of a sequence stop short. It has failed unless it ends with those before.
        logprobs: of the sampled ids, for sequences that asked.
        prompt_logprobs: (start, rows): row i is about the token at position start + i + 1; for sequences
            that asked and had prompt tokens in this step.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    failed: dict[int, Fault] = field(default_factory=dict)
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, LogprobRows]] = field(default_factory=dict)
