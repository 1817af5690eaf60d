"""`jaxserve bench`: the benchmarks of jaxserve.bench as commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig


@click.group(short_help="Measure speed, start-up and host work.")
def bench() -> None:
    """Measure jaxserve. Every number is the median of --repetitions; docs/performance.md has the method."""


def _json_option(command: Callable) -> Callable:
    return click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False),
                        help="Also write the report, with environment and single runs, to this file.")(command)


def _repetitions_option(command: Callable) -> Callable:
    return click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True,
                        help="Measured runs, after one for warm-up.")(command)


def _model_command(name: str, short_help: str) -> Callable[[Callable], click.Command]:
    def decorate(function: Callable) -> click.Command:
        for decorator in (options_of(EngineConfig), _json_option, _repetitions_option,
                          click.argument("model", default="demo")):
            function = decorator(function)
        return bench.command(name, cls=SectionedCommand, short_help=short_help)(function)

    return decorate


def _run_offline(model: str, options: dict[str, Any], json_file: Path | None, run: Callable) -> None:
    """Runs a benchmark on an engine of its own and shows the report."""
    from jaxserve import LLM
    from jaxserve.bench import measure
    chosen = given(EngineConfig, options)
    with LLM(model, **chosen) as llm:
        report = run(llm)
        report.facts["KV pool (MB)"] = llm.metrics()["kv_pool_bytes"] / 1e6
    report.model, report.options = model, chosen
    if (peak := measure.peak_memory_mb()) is not None:
        report.facts["peak memory (MB)"] = peak
    _finish(report, json_file)


def _finish(report: Any, json_file: Path | None) -> None:
    report.print()
    if json_file is not None:
        report.write(json_file)


@_model_command("throughput", "Many requests of mixed lengths at once.")
def throughput(model: str, repetitions: int, json_file: Path | None, **options: Any) -> None:
    """32 requests of mixed lengths submitted together: tokens per second."""
    from jaxserve.bench import offline
    _run_offline(model, options, json_file, lambda llm: offline.throughput(llm, repetitions))


@_model_command("latency", "One request at a time.")
def latency(model: str, repetitions: int, json_file: Path | None, **options: Any) -> None:
    """One request at a time, 128 tokens in and 128 out: time to the first token, and between tokens."""
    from jaxserve.bench import offline
    _run_offline(model, options, json_file, lambda llm: offline.latency(llm, repetitions))


@_model_command("prefix", "Requests that share a long prefix.")
@click.option("--baseline", is_flag=True, help="Also measure the same shape with nothing shared.")
def prefix(model: str, repetitions: int, json_file: Path | None, baseline: bool, **options: Any) -> None:
    """32 requests that share 512 tokens, submitted together."""
    from jaxserve.bench import offline
    _run_offline(model, options, json_file, lambda llm: offline.prefix(llm, repetitions, baseline=baseline))


@_model_command("startup", "Process start to first token.")
def startup(model: str, repetitions: int, json_file: Path | None, **options: Any) -> None:
    """Process start to first token, with an empty compilation cache and with a filled one."""
    from jaxserve.bench import startup as benchmark
    _finish(benchmark.startup(model, given(EngineConfig, options), repetitions), json_file)


@bench.command(short_help="The host's work per step, without a model.")
@click.option("--running", type=click.IntRange(min=1), default=256, show_default=True,
              help="Sequences that decode.")
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Steps of one run.")
@_repetitions_option
@_json_option
def host(running: int, steps: int, repetitions: int, json_file: Path | None) -> None:
    """Schedule, pack and commit of one decode step, in ms, without a model."""
    from jaxserve.bench import host as benchmark
    _finish(benchmark.host(running, steps, repetitions), json_file)
