"""What one step brought to the host, as plain numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


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
        token_ids: ids of rows that sampled, one a decode step.
        failed: sequences whose logits were not finite; their ids mean nothing.
        logprobs: of the sampled ids, for sequences that asked.
        prompt_logprobs: (start, rows): row i is about the token at position start + i + 1; for sequences
            that asked and had prompt tokens in this step.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, LogprobRows]] = field(default_factory=dict)
