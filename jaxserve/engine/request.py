"""One sequence in the engine, and what the scheduler decides about it.

A user's request with n completions is n sequences with the same prompt (a SequenceGroup in the
processor's hands); the scheduler only sees sequences.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from jaxserve.outputs import FinishReason


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # in the waiting queue again; its pages and slot are gone
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions:
    """Sampling options with every default resolved and every id checked. See SamplingParams.

    `eos_ids`: empty with ignore_eos. `stop_ids`: stop_token_ids. While fewer than `min_tokens` ids are
    generated both are masked. `bad_words`: token sequences. `seed`: 64 bits, unique to the sequence (the
    completion index is mixed in already).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence and its three counters.

    Attributes:
        seq_id: unique per submission, never reused; the user's request id lives outside the scheduler.
        token_ids: prompt, then the generated ids that have reached the host.
        num_computed: tokens whose K/V rows are in pages or are being written by a launched step.
        num_sampled_in_flight: ids sampled on the device that have not reached the host yet. So
            `len(token_ids) + num_sampled_in_flight` tokens are known to the device.
        pages: page ids, in order.
        slot: row of the device's per-slot state while RUNNING, else -1.
        num_cached_tokens: prompt tokens served by the prefix cache at first admission.
        arrival: order of arrival; kept through preemption.
        generation: counts preemptions, so a late result of an earlier life is recognised.
    """

    seq_id: int
    prompt_len: int
    token_ids: list[int]
    options: SequenceOptions
    arrival: int
    status: Status = Status.WAITING
    num_computed: int = 0
    num_sampled_in_flight: int = 0
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of the full pages known so far
    slot: int = -1
    num_cached_tokens: int = 0
    generation: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_known(self) -> int:
        """Tokens that the device knows: the host's, and those sampled but not fetched yet."""
        return len(self.token_ids) + self.num_sampled_in_flight

    @property
    def num_output(self) -> int:
        """Generated tokens, those in flight included."""
        return self.num_known - self.prompt_len

    @property
    def max_len(self) -> int:
        """The sequence ends when it has this many tokens."""
        return self.prompt_len + self.options.max_tokens


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One sequence's work in one step: tokens `start .. start + num_tokens - 1`.

    `samples`: the row's last token is the last one known, so its logits give the next token. A decode
    row (in StepPlan.decodes) has num_tokens == 1 (or up to `decode_steps` sampled ones).
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. `decodes` first in the batch, then `prefills` (multi-token chunks).

    `decode_steps`: sampled tokens per decode row in this launch; a row's own number is its num_tokens.
    `admitted`: sequences that got a slot in this plan; their slot state must be uploaded before launch.
    `block_tables`: i32[num_slots + 1, max_pages_per_seq], the live table by slot, owned by the scheduler.
        The runner copies the rows it needs at pack time.
    """

    step_id: int
    decodes: tuple[ScheduledRow, ...] = ()
    prefills: tuple[ScheduledRow, ...] = ()
    decode_steps: int = 1
    admitted: tuple[Sequence, ...] = ()
    block_tables: np.ndarray

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.decodes + self.prefills
