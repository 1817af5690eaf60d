"""A very small engine without scheduler: plans, runners, and steps written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.request import ScheduledRow, Sequence, SequenceOptions, StepPlan
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.models.spec import DecoderSpec, RopeSpec
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.planning import plan_engine
from jaxserve.runtime.programs import EnginePlan
from jaxserve.runtime.runner import Runner

VOCAB, VALID_VOCAB = 96, 90
SPEC = DecoderSpec(
    name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=48, vocab_size=VOCAB,
    max_position=4096, norm_eps=1e-5, rope=RopeSpec(inv_freq=tuple(1 / 10**(i / 2) for i in range(8))),
    attn_scale=0.25, layer_windows=(None, None), layer_uses_rope=(True, True), tie_embeddings=True)
# The pool (12 MB) is large beside a step's temporaries, so that a copy of it would be seen.
OPTIONS = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 64, "page_size": 8,
           "num_pages": 3000, "max_logprobs": 3}


def make_plan(dtype: str = "float32", **options: Any) -> EnginePlan:
    options = OPTIONS | {"compilation_cache_dir": ""} | options
    return plan_engine(SPEC, dtype, EngineConfig(**options), VALID_VOCAB, jax.devices()[0])


def make_params(dtype: str = "float32", seed: int = 0) -> DecoderParams:
    """Normal weights, large enough that ids differ from place to place."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jax.device_put(rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype)),
                        abstract_params(SPEC, dtype))


def make_runner(plan: EnginePlan, params: DecoderParams, cache_dir: str = "") -> Runner:
    runner = Runner(plan, params, Executables(plan.lower, cache_dir))
    runner.reset_state()
    return runner


class Rig:
    """Hands out slots and pages for a runner's sequences, and makes plans. Every sequence gets all pages it can use."""

    def __init__(self, runner: Runner):
        self.runner = runner
        config = runner.config
        self.tables = np.zeros((config.max_num_seqs + 1, config.max_pages_per_seq), np.int32)
        self._slots, self._pages, self._ids = itertools.count(), itertools.count(1), itertools.count()
        self._admitted: list[Sequence] = []

    def add(self, prompt: Seq[int], max_tokens: int = 20, **options: Any) -> Sequence:
        seq_id = next(self._ids)
        options.setdefault("temperature", 0.0)
        seq = Sequence(seq_id=seq_id, prompt_len=len(prompt), token_ids=list(prompt), arrival=seq_id,
                       options=SequenceOptions(max_tokens=max_tokens, **options))
        seq.slot = next(self._slots)
        for i in range(-(-seq.max_len // self.runner.config.page_size)):
            self.tables[seq.slot, i] = next(self._pages)
        self._admitted.append(seq)
        return seq

    def row(self, seq: Sequence, start: int, count: int, samples: bool) -> ScheduledRow:
        return ScheduledRow(seq, start, count, samples, seq.slot, seq.generation)

    def prefill(self, seq: Sequence, start: int = 0, end: int | None = None) -> ScheduledRow:
        """Tokens start .. end - 1 of the prompt; its last one samples."""
        end = seq.prompt_len if end is None else end
        return self.row(seq, start, end - start, end == seq.prompt_len)

    def plan(self, decodes: Seq[ScheduledRow] = (), prefills: Seq[ScheduledRow] = ()) -> StepPlan:
        admitted, self._admitted = tuple(self._admitted), []
        return StepPlan(decodes=tuple(decodes), prefills=tuple(prefills), admitted=admitted,
                        block_tables=self.tables)

    def generate(self, seq: Sequence, count: int) -> list[int]:
        """The first `count` greedy ids, one step after the other. Decode rows do not wait for the id before."""
        launched = [self.runner.launch(self.plan(prefills=[self.prefill(seq)]))]
        for i in range(count - 1):
            launched.append(self.runner.launch(self.plan([self.row(seq, seq.prompt_len + i, 1, True)])))
        return [self.runner.fetch(step).token_ids[seq.seq_id][0] for step in launched]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VALID_VOCAB, length).tolist()
