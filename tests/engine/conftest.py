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
    token: int
    kind: str  # "decode" or "prefill", the shape of the row that wrote it
    params: int  # the oldest parameters that have a part in it


class FakeDevice:
    """Runs plans; `launch` returns the ids as the host will fetch them later."""

    def __init__(self, config: ResolvedConfig):
        self.config = config
        self.params = 0
        self.lose_pool()

    def lose_pool(self) -> None:
        self.kv: dict[tuple[int, int], KV] = {}  # (page, offset) -> what is there
        self.known: dict[int, list[int]] = {}  # slot -> tokens
        self.params_at_start: dict[int, int] = {}  # slot -> parameters when its sequence was admitted

    def launch(self, plan: StepPlan) -> dict[int, list[int]]:
        for row in plan.rows:
            if row.seq in plan.admitted:
                self.known[row.slot] = list(row.seq.token_ids)
                self.params_at_start[row.slot] = self.params
        sampled: dict[int, list[int]] = {}
        for k in range(plan.decode_steps):
            rows = [(row, row.start + k, row.start + k + 1, "decode") for row in plan.decodes if k < row.num_tokens]
            if k == 0:
                rows += [(row, row.start, row.start + row.num_tokens, "prefill") for row in plan.prefills]
            tables = [plan.block_tables[row.slot].tolist() for row, *_ in rows]
            for (row, start, end, kind), table in zip(rows, tables):  # all writes come before any read
                for position in range(start, end):
                    page = table[position // self.config.page_size]
                    assert page != 0, "a real row writes to the dummy page"
                    self.kv[page, position % self.config.page_size] = KV(
                        self.known[row.slot][position], kind, self.params_at_start[row.slot])
            for (row, _, end, _), table in zip(rows, tables):
                known = self.known[row.slot]
                self._check_context(row.slot, table, known[:end], row.seq.prompt_len)
                assert row.samples == (end == len(known))
                if row.samples:
                    known.append(next_id(known, row.seq.options.seed))
                    sampled.setdefault(row.seq.seq_id, []).append(known[-1])
        return sampled

    def _check_context(self, slot: int, table: list[int], tokens: list[int], prompt_len: int) -> None:
        size = self.config.page_size
        for position, token in enumerate(tokens):
            kv = self.kv[table[position // size], position % size]
            assert kv.token == token, f"position {position} holds the K/V of {kv.token}, not of {token}"
            assert kv.params >= self.params_at_start[slot], "K/V of older parameters"
            if self.config.deterministic:
                assert kv.kind == ("prefill" if position < prompt_len else "decode")


class Loop:
    """The engine's loop: launch a plan, then commit the one before it."""

    def __init__(self, config: ResolvedConfig):
        self.config = config
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.outstanding: tuple[StepPlan, dict[int, list[int]]] | None = None

    def step(self, commit_before_launch: bool = False) -> StepPlan | None:
        """One turn. `commit_before_launch`: the earlier results arrive between planning and launching."""
        earlier, plan = self.outstanding, self.scheduler.schedule()
        assert plan or earlier or not self.scheduler.has_work, "work is left, nothing is in flight, no plan"
        if commit_before_launch and earlier:
            self.scheduler.commit(*earlier)
        self.outstanding = (plan, self.device.launch(plan)) if plan else None
        if not commit_before_launch and earlier:
            self.scheduler.commit(*earlier)
        return plan

    def drain(self) -> None:
        """Brings the outstanding results, so that nothing is in flight."""
        if self.outstanding:
            self.scheduler.commit(*self.outstanding)
            self.outstanding = None

    def run(self, limit: int = 3000) -> list[StepPlan]:
        """Until everything has finished; returns the plans."""
        plans = []
        while self.scheduler.has_work or self.outstanding:
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
    """make_loop(**options of ResolvedConfig) -> Loop, with small defaults."""
    def make(**options) -> Loop:
        defaults = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, max_waiting_requests=100,
                        page_size=4, num_pages=64, enable_prefix_caching=True, scheduling_policy="fcfs",
                        decode_steps=1, deterministic=False, max_logprobs=5, query_block=8, vocab_size=VOCAB)
        return Loop(ResolvedConfig(**(defaults | options)))
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
    """solo_run(finished sequence) -> (ids, finish reason, stop reason) that it has whatever ran beside it."""
    def run(seq: Sequence):
        ids, options = seq.token_ids[:seq.prompt_len], seq.options
        while len(ids) < seq.max_len:
            ids.append(next_id(ids, options.seed))
            if len(ids) - seq.prompt_len > options.min_tokens:
                if ids[-1] in options.eos_ids:
                    return ids, "stop", None
                if ids[-1] in options.stop_ids:
                    return ids, "stop", ids[-1]
        return ids, "length", None
    return run
