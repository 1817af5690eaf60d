"""The waiting sequences in policy order, and the rule that bounds how often one is overtaken."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq

from jaxserve.engine.request import Sequence, Status

# A sequence that lacks pages lets this many sequences behind it pass, then nobody until it is admitted.
# Enough to keep the batch full while a long prompt waits for its pages, few enough that it waits for
# about one batch's turnover at most.
MAX_OVERTAKES = 16

# How many sequences an admission pass looks at, so that its cost does not grow with the queue.
ADMISSION_WINDOW = 32


def importance(seq: Sequence) -> tuple[int, int]:
    """Sort key of running sequences, the most important first: class, then age. (Without priority
    scheduling there is one class.)"""
    return seq.options.priority, seq.arrival


def _queue_key(seq: Sequence) -> tuple[int, bool, int]:
    """Preempted sequences stand at the front of their class."""
    return seq.options.priority, seq.status is not Status.PREEMPTED, seq.arrival


class WaitingQueue:
    """A sorted list: finding a place takes O(log n) comparisons, and the moves are one memmove."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self):
        return iter(self._seqs)

    def push(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=_queue_key)

    def remove(self, seq: Sequence) -> None:
        """Removes a queued sequence; its status must be the one it was pushed with."""
        remove_sorted(self._seqs, seq, _queue_key)

    def window(self) -> Seq[Sequence]:
        """The sequences that an admission pass looks at (a copy)."""
        return self._seqs[:ADMISSION_WINDOW]


def remove_sorted(seqs: list[Sequence], seq: Sequence, key) -> None:
    """Removes `seq` from a list sorted by `key`, which tells all its members apart."""
    index = bisect_left(seqs, key(seq), key=key)
    assert seqs[index] is seq
    del seqs[index]
