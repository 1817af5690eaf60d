"""One sequence in the engine, and what the scheduler decides about it.

A user's request with n completions is n sequences with the same prompt (see `core.Request`); the scheduler
only sees sequences.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


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
        max_len: the sequence ends when it has this many tokens: `prompt_len + max_tokens`.
        num_computed: tokens whose K/V rows are in pages or are being written by a launched step.
        num_sampled_in_flight: ids sampled on the device that have not reached the host yet. So
            `len(token_ids) + num_sampled_in_flight` tokens are known to the device.
        pages: page ids, in order.
        page_hashes: prefix-cache keys of the first full pages, as far as they were needed. They depend on
            the tokens alone and survive preemption.
        num_published: how many of `pages` have been offered to the prefix cache in this life.
        publishes: False from a reset of the prefix cache until the pages are given back: their K/V, and
            what is computed from it, may be of older parameters.
        slot: row of the device's per-slot state while RUNNING, else -1.
        num_cached_tokens: prompt tokens served by the prefix cache at first admission.
        arrival: order of arrival; kept through preemption.
        generation: counts how often launched work was declared void (the device's pool was lost), so that
            a late result of it is recognised. Preemption does not count: ids sampled before it are as
            good as those after it, being functions of (tokens so far, seed, position).
        overtaken: how many sequences behind it in the queue were admitted before it.
    """

    seq_id: int
    prompt_len: int
    token_ids: list[int]
    options: SequenceOptions
    arrival: int
    status: Status = Status.WAITING
    num_computed: int = 0
    num_sampled_in_flight: int = 0
    max_len: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    publishes: bool = True
    slot: int = -1
    num_cached_tokens: int = 0
    generation: int = 0
    overtaken: int = 0

    def __post_init__(self) -> None:
        self.max_len = self.prompt_len + self.options.max_tokens

    @property
    def num_known(self) -> int:
        """Tokens that the device knows: the host's, and those sampled but not fetched yet."""
        return len(self.token_ids) + self.num_sampled_in_flight


class ScheduledRow(NamedTuple):  # a third of the cost of a frozen dataclass, and there are hundreds a step
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
        The runner copies the rows it needs at pack time, before the next `schedule`. Entries beyond a
        sequence's pages, and the last row, are the dummy page 0; rows of slots in no plan are stale.
    """

    decodes: tuple[ScheduledRow, ...] = ()
    prefills: tuple[ScheduledRow, ...] = ()
    decode_steps: int = 1
    admitted: tuple[Sequence, ...] = ()
    block_tables: np.ndarray

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.decodes + self.prefills
