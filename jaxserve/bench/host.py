"""The host's work in one step, without a model: schedule, pack, commit.

On an accelerator a decode step takes a few milliseconds, and the host must have the next one ready by
then. All sequences decode, each after a prompt of its own, as in the engine's loop: step N+1 is planned
before the ids of step N are committed.
"""

from __future__ import annotations

import time

import numpy as np

from jaxserve.bench import measure
from jaxserve.bench.report import Report
from jaxserve.config import ResolvedConfig
from jaxserve.engine.request import Sequence, SequenceOptions, StepPlan
from jaxserve.engine.scheduler import Scheduler
from jaxserve.runtime.batch import pack
from jaxserve.runtime.buckets import choose_bucket, make_buckets

PROMPT_LEN = 128
PAGE_SIZE = 16


def host(running: int = 256, steps: int = 300, repetitions: int = 3) -> Report:
    """Times `steps` decode steps of `running` sequences.

    The samples are each repetition's medians over its steps, in ms.
    """
    report = Report("host", f"{running} sequences decoding, {steps} steps, no model", samples={})
    for _ in range(repetitions):
        with measure.Stopwatch() as watch:
            times = _decode(running, steps)
        report.foreign_cpu.append(watch.foreign_cpu)
        times["step"] = [sum(parts) for parts in zip(*times.values())]
        for phase, seconds in times.items():
            report.samples.setdefault(f"{phase}_ms", []).append(1e3 * measure.percentile(seconds, 50))
        report.samples.setdefault("step_p99_ms", []).append(1e3 * measure.percentile(times["step"], 99))
    return report


def _decode(running: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step's phases."""
    config = _config(running, steps)
    scheduler, buckets = Scheduler(config), make_buckets(config)
    rng = np.random.default_rng(0)
    for seq_id in range(running):
        prompt = rng.integers(300, 49_000, PROMPT_LEN).tolist()
        options = SequenceOptions(max_tokens=config.max_model_len - PROMPT_LEN)
        scheduler.add(Sequence(seq_id, PROMPT_LEN, prompt, options, arrival=seq_id))
    plan = _next(scheduler)
    while scheduler.num_waiting or plan.prefills:
        scheduler.commit(plan, _ids(plan))
        plan = _next(scheduler)

    times: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    for _ in range(steps):
        ids = _ids(plan)  # what the device brings
        marks = [time.perf_counter()]
        following = _next(scheduler)
        marks.append(time.perf_counter())
        bucket = choose_bucket(buckets, len(following.decodes), 0)
        pack(following.decodes, following.prefills, bucket, following.block_tables, config.query_block)
        marks.append(time.perf_counter())
        scheduler.commit(plan, ids)
        marks.append(time.perf_counter())
        for phase, start, end in zip(times, marks, marks[1:]):
            times[phase].append(end - start)
        plan = following
    return times


def _next(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _ids(plan: StepPlan) -> dict[int, list[int]]:
    return {row.seq.seq_id: [7] for row in plan.rows if row.samples}


def _config(running: int, steps: int) -> ResolvedConfig:
    # Room for the prompt, the decodes while the others are still prefilled, and the measured steps.
    max_model_len = 2 * PROMPT_LEN + running + steps
    return ResolvedConfig(
        max_model_len=max_model_len, max_num_seqs=running, max_num_batched_tokens=2048, max_waiting_requests=running,
        page_size=PAGE_SIZE, num_pages=1 + running * -(-max_model_len // PAGE_SIZE), enable_prefix_caching=True,
        scheduling_policy="fcfs", decode_steps=1, deterministic=False, max_logprobs=20, query_block=16,
        vocab_size=50_000)
