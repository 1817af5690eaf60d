"""A device without a model, for scheduler tests.

It writes and reads KV pages as the real one does, but a K/V row is just a record of what was written, and
a sampled id is a hash of all tokens so far. Any wrong page, stale prefix hit or lost token is either
caught when a row reads its context, or changes the ids.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest

from jaxserve.config import ResolvedConfig
from jaxserve.engine.request import Sequence, SequenceOptions, StepPlan
from jaxserve.engine.scheduler import Scheduler

VOCAB = 50


class KV(NamedTuple):
    context: int  # hash of the cache salt and all tokens up to this one
    kind: str  # "decode" or "prefill", the shape of the row that wrote it
    params: int  # the oldest parameters that have a part in it


class SlotState:
    """What the device knows of a running sequence."""

    def __init__(self, seq: Sequence, params: int):
        self.salt = seq.options.cache_salt
        self.tokens: list[int] = []
        self.contexts: list[int] = []
        self.params = params
        for token in seq.token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.contexts[-1] if self.contexts else crc32(repr(self.salt).encode())
        self.contexts.append(crc32(token.to_bytes(2), before))
        self.tokens.append(token)


class FakeDevice:
    """Runs plans; `launch` returns the ids as the host will fetch them later."""

    def __init__(self, config: ResolvedConfig):
        self.config = config
        self.params = 0
        self.lose_pool()

    def lose_pool(self) -> None:
        self.kv: dict[tuple[int, int], KV] = {}  # (page, offset) -> what is there
        self.slots: dict[int, SlotState] = {}

    def launch(self, plan: StepPlan) -> dict[int, list[int]]:
        for row in plan.rows:
            if row.seq in plan.admitted:
                assert row.seq.num_sampled_in_flight == (row.num_tokens if plan.decode_steps > 1 else row.samples), (
                    "the uploaded token ids lack some that are still in flight")
                self.slots[row.slot] = SlotState(row.seq, self.params)
        sampled: dict[int, list[int]] = {}
        for k in range(plan.decode_steps):
            spans = [(row, row.start + k, row.start + k + 1, "decode") for row in plan.decodes if k < row.num_tokens]
            if k == 0:
                spans += [(row, row.start, row.start + row.num_tokens, "prefill") for row in plan.prefills]
            for row, start, end, kind in spans:  # all writes come before any read
                slot = self.slots[row.slot]
                for position, where in self._places(plan, row.slot, start, end):
                    assert where[0] != 0, "a real row writes to the dummy page"
                    self.kv[where] = KV(slot.contexts[position], kind, slot.params)
            for row, _, end, _ in spans:
                slot = self.slots[row.slot]
                for position, where in self._places(plan, row.slot, 0, end):
                    kv = self.kv[where]
                    assert kv.context == slot.contexts[position], f"position {position} holds another context's K/V"
                    assert kv.params >= slot.params, "K/V of older parameters"
                    if self.config.deterministic:
                        assert kv.kind == ("prefill" if position < row.seq.prompt_len else "decode")
                assert row.samples == (end == len(slot.tokens))
                if row.samples:
                    slot.append(next_id(slot.tokens, row.seq.options.seed))
                    sampled.setdefault(row.seq.seq_id, []).append(slot.tokens[-1])
        return sampled

    def _places(self, plan: StepPlan, slot: int, start: int, end: int):
        size, table = self.config.page_size, plan.block_tables[slot].tolist()
        return [(i, (table[i // size], i % size)) for i in range(start, end)]


class Loop:
    """The engine's loop: launch a plan, then commit the one that was launched `depth` before it."""

    def __init__(self, config: ResolvedConfig, depth: int = 1):
        self.config = config
        self.depth = depth
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.in_flight: list[tuple[StepPlan, dict[int, list[int]]]] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_running + self.scheduler.num_waiting > 0

    def step(self, commit_before_launch: bool = False) -> StepPlan | None:
        """One turn. `commit_before_launch`: the earlier results arrive between planning and launching."""
        plan = self.scheduler.schedule()
        assert plan or self.in_flight or not self.has_work, "work is left, nothing is in flight, no plan"
        due = bool(self.in_flight) and (plan is None or len(self.in_flight) >= self.depth)
        if due and commit_before_launch:
            self.scheduler.commit(*self.in_flight.pop(0))
        if plan:
            self.in_flight.append((plan, self.device.launch(plan)))
        if due and not commit_before_launch:
            self.scheduler.commit(*self.in_flight.pop(0))
        return plan

    def drain(self) -> None:
        """Brings the outstanding results, so that nothing is in flight."""
        while self.in_flight:
            self.scheduler.commit(*self.in_flight.pop(0))

    def run(self, limit: int = 3000) -> list[StepPlan]:
        """Until everything has finished; returns the plans."""
        plans = []
        while self.has_work or self.in_flight:
            plans.append(self.step())
            assert len(plans) < limit, f"not finished after {limit} steps"
        return [plan for plan in plans if plan]

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)


def next_id(token_ids: list[int], seed: int) -> int:
    return crc32(np.asarray([seed, *token_ids], np.int32).tobytes()) % VOCAB


@pytest.fixture
def make_loop():
    """make_loop(depth=1, **options of ResolvedConfig) -> Loop, with small defaults."""
    def make(depth: int = 1, **options) -> Loop:
        defaults = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, max_waiting_requests=100,
                        page_size=4, num_pages=64, enable_prefix_caching=True, scheduling_policy="fcfs",
                        decode_steps=1, deterministic=False, max_logprobs=5, query_block=8, vocab_size=VOCAB)
        return Loop(ResolvedConfig(**(defaults | options)), depth)
    return make


@pytest.fixture
def make_seq():
    """make_seq(id, prompt ids or their number, **sequence options) -> Sequence; arrival is the id."""
    def make(seq_id: int, prompt: list[int] | int, **options) -> Sequence:
        ids = [(7 * seq_id + i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        return Sequence(seq_id=seq_id, prompt_len=len(ids), token_ids=ids, arrival=seq_id,
                        options=SequenceOptions(**({"max_tokens": 4} | options)))
    return make


@pytest.fixture
def solo_run():
    """solo_run(finished sequence) -> the ids that it has whatever ran beside it."""
    def run(seq: Sequence) -> list[int]:
        ids, options = seq.token_ids[:seq.prompt_len], seq.options
        while len(ids) < seq.max_len:
            ids.append(next_id(ids, options.seed))
            if len(ids) - seq.prompt_len > options.min_tokens and ids[-1] in options.eos_ids | options.stop_ids:
                break
        return ids
    return run
