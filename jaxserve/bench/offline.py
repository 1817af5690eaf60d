"""The benchmarks that run an `LLM`: throughput, latency and prefix reuse.

Each first runs repetition 0 untimed, so compilation is not in the numbers (`startup` measures that).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jaxserve.bench import measure
from jaxserve.bench.report import Report
from jaxserve.bench.workloads import Batch, Repetition, repetition
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve import LLM


def throughput(llm: LLM, repetitions: int = 3) -> Report:
    """32 requests of mixed lengths submitted together: tokens per second."""
    runs = _repetitions(llm, repetitions)
    _generate(llm, runs[0].mixed)
    report = Report("throughput", "32 requests, 32-512 tokens in, 32-256 out, submitted together",
                    samples={"total_s": [], "output_tok_per_s": [], "all_tok_per_s": []})
    before = llm.metrics()
    for run in runs[1:]:
        seconds = _timed(llm, run.mixed, report)
        report.samples["total_s"].append(seconds)
        report.samples["output_tok_per_s"].append(run.mixed.output_tokens / seconds)
        report.samples["all_tok_per_s"].append((run.mixed.output_tokens + run.mixed.prompt_tokens) / seconds)
    _add_steps(report, before, llm.metrics(), repetitions)
    return report


def latency(llm: LLM, repetitions: int = 3) -> Report:
    """One request at a time, 128 tokens in and 128 out.

    The decode speed is 127 tokens over the difference between a request of 128 tokens and one of a single
    token, so it does not rest on the engine's own clocks. The gaps between tokens come from a stream.
    """
    runs = _repetitions(llm, repetitions)
    report = Report("latency", "one request at a time, 128 tokens in, 128 out",
                    samples={"first_token_s": [], "total_s": [], "decode_tok_per_s": [],
                             "token_gap_p50_ms": [], "token_gap_p99_ms": []})
    _generate(llm, runs[0].first_token)
    _generate(llm, runs[0].stream)
    for run in runs[1:]:
        first = _timed(llm, run.first_token, report)
        total = _timed(llm, run.stream, report)
        # The same prompt backwards: as long, and nothing of it is in the prefix cache.
        gaps = _token_gaps(llm, run.stream.prompts[0][::-1], run.stream.max_tokens[0])
        report.samples["first_token_s"].append(first)
        report.samples["total_s"].append(total)
        report.samples["decode_tok_per_s"].append((run.stream.output_tokens - 1) / (total - first))
        report.samples["token_gap_p50_ms"].append(1e3 * measure.percentile(gaps, 50))
        report.samples["token_gap_p99_ms"].append(1e3 * measure.percentile(gaps, 99))
    return report


def prefix(llm: LLM, repetitions: int = 3, *, baseline: bool = False) -> Report:
    """32 requests that share their first 512 tokens, submitted together to a cache that knows none of them.

    `baseline` runs the same shape with nothing shared, too, and gives the ratio.
    """
    runs = _repetitions(llm, repetitions)
    report = Report("prefix", "32 requests, 512 shared and 32 own tokens in, 32 out, submitted together",
                    samples={"total_s": [], "output_tok_per_s": [], "cached_tok": []})
    _generate(llm, runs[0].shared_prefix)
    for run in runs[1:]:
        with measure.Stopwatch() as watch:
            outputs = _generate(llm, run.shared_prefix)
        report.foreign_cpu.append(watch.foreign_cpu)
        report.samples["total_s"].append(watch.seconds)
        report.samples["output_tok_per_s"].append(run.shared_prefix.output_tokens / watch.seconds)
        report.samples["cached_tok"].append(sum(output.num_cached_tokens for output in outputs))
    if baseline:
        report.samples["nothing_shared_total_s"] = [_timed(llm, run.no_shared_prefix, report) for run in runs[1:]]
        report.facts["nothing shared / shared"] = report.median("nothing_shared_total_s") / report.median("total_s")
    return report


def _repetitions(llm: LLM, count: int) -> list[Repetition]:
    return [repetition(index, llm.config.vocab_size) for index in range(count + 1)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _generate(llm: LLM, batch: Batch) -> list:
    """Runs a batch and checks that every request did all of its work."""
    prompts = [{"prompt_token_ids": ids} for ids in batch.prompts]
    outputs = llm.generate(prompts, [greedy(count) for count in batch.max_tokens], use_tqdm=False)
    for output, count in zip(outputs, batch.max_tokens):
        if output.error is not None:
            raise output.error
        if len(output.outputs[0].token_ids) != count:
            raise RuntimeError(f"request {output.request_id} gave {len(output.outputs[0].token_ids)} tokens "
                               f"instead of {count}: the time would not be comparable")
    return outputs


def _timed(llm: LLM, batch: Batch, report: Report) -> float:
    with measure.Stopwatch() as watch:
        _generate(llm, batch)
    report.foreign_cpu.append(watch.foreign_cpu)
    return watch.seconds


def _token_gaps(llm: LLM, prompt: list[int], max_tokens: int) -> list[float]:
    times = []
    for event in llm.stream({"prompt_token_ids": prompt}, greedy(max_tokens)):
        if event.token_ids:
            times.append(time.perf_counter())
    return [later - earlier for earlier, later in zip(times, times[1:])]


def _add_steps(report: Report, before: dict, after: dict, runs: int) -> None:
    """Adds what the engine counted in the timed runs."""
    steps, rows, padded = (after[name] - before[name] for name in ("steps", "token_rows", "token_rows_padded"))
    report.facts["steps per run"] = steps / runs
    report.facts["padding (share of computed rows)"] = 1 - rows / padded
    report.facts["executables"] = after["executables"]
    report.facts["executables compiled in the timed runs"] = after["executables"] - before["executables"]
