"""`jaxserve bench`: the benchmarks of jaxserve.bench as commands."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import FiniteRange, SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.sampling_params import INT32_MAX

_MOST = 1_000_000  # of whatever is counted: a slip of the finger must not fill the memory


@click.group(short_help="Measure speed, start-up and host work.")
def bench() -> None:
    """Measure jaxserve; docs/performance.md has the method. Of commands with --repetitions each number is the median.
    """


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """The path, if a file can be written there: not to be found out after minutes of measuring."""
    if path is not None and not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise click.BadParameter(f"{path} cannot be written; give a file in a directory that exists", ctx, param)
    return path


def _json_option(command: Callable) -> Callable:
    return click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), callback=_writable,
                        help="Also write the report, with environment and single runs, to this file.")(command)


def _repetitions_option(command: Callable) -> Callable:
    return click.option("--repetitions", type=click.IntRange(min=1, max=_MOST), default=3, show_default=True,
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
@click.option("--running", type=click.IntRange(min=1, max=65_536), default=256, show_default=True,
              help="Sequences that decode.")
@click.option("--steps", type=click.IntRange(min=1, max=_MOST), default=300, show_default=True,
              help="Steps of one run.")
@_repetitions_option
@_json_option
def host(running: int, steps: int, repetitions: int, json_file: Path | None) -> None:
    """Schedule, pack and commit of one decode step, in ms, without a model."""
    from jaxserve.bench import host as benchmark
    _finish(benchmark.host(running, steps, repetitions), json_file)


class _Parsed(click.ParamType):
    """A text that `parse` understands; its ValueError is what the user sees."""

    def __init__(self, name: str, parse: Callable[[str], Any]):
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _lengths(text: str) -> Any:
    from jaxserve.bench.serve_load import LengthRange
    return LengthRange.parse(text)


def _slos(text: str) -> dict[str, float]:
    from jaxserve.bench.serve_metrics import parse_slos
    return parse_slos(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return value


@bench.command(short_help="Load on a running server.")
@click.option("--url", help="OpenAI endpoint, such as http://127.0.0.1:8000.")
@click.option("--grpc", "grpc_target", metavar="HOST:PORT", help="Or gRPC of a jaxserve server.")
@click.option("--model", help="Default: the first that the endpoint names.")
@click.option("--api", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--text", is_flag=True, help="Completions get words instead of token ids.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--request-rate", type=FiniteRange(min=0, min_open=True),
              help="Open loop: so many conversations begin per second, at random moments (Poisson).")
@click.option("--concurrency", type=click.IntRange(min=1, max=_MOST),
              help="Closed loop: so many run at a time. Default 16.")
@click.option("--conversations", type=click.IntRange(min=1, max=_MOST), default=100, show_default=True,
              help="How many; each makes --turns requests.")
@click.option("--input-tokens", type=_Parsed("N or N-M", _lengths), default="128", show_default=True,
              help="Of each turn.")
@click.option("--output-tokens", type=_Parsed("N or N-M", _lengths), default="128", show_default=True)
@click.option("--turns", type=click.IntRange(min=1, max=_MOST), default=1, show_default=True,
              help="Requests of a conversation, each with what was said before.")
@click.option("--think-time", type=FiniteRange(min=0), default=0.0, show_default=True,
              help="Seconds between an answer and the next turn.")
@click.option("--shared-prefix", type=click.IntRange(min=0, max=_MOST), default=0, show_default=True,
              help="Tokens with which conversations begin alike, before --input-tokens.")
@click.option("--prefixes", type=click.IntRange(min=1, max=_MOST), default=1, show_default=True,
              help="Different shared prefixes, used in turn.")
@click.option("--dataset", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help='JSON lines with "prompt" or "messages", and perhaps "max_tokens", instead of random prompts.')
@click.option("--vocab-size", type=click.IntRange(min=2, max=INT32_MAX), default=49_000, show_default=True,
              help="Random ids are below it.")
@click.option("--sampling", type=_Parsed("JSON", _json_object), default="{}",
              help="Further fields of the requests. Greedy without.")
@click.option("--our-fields/--no-our-fields", default=None,
              help="Send ignore_eos and return_token_ids. Default: to servers that say they are jaxserve or vLLM.")
@click.option("--slo", type=_Parsed("ttft=300ms,tpot=50ms,e2e=10s", _slos), default=None,
              help="Bounds for goodput; any of the three.")
@click.option("--timeout", type=FiniteRange(min=0, min_open=True), help="Seconds for a request. Default: none.")
@click.option("--warmup", type=click.IntRange(min=0, max=_MOST), default=2, show_default=True,
              help="Conversations before, one after the other, that are not counted.")
@click.option("--seed", type=int, help="Repeats a run; its prompts are in the server's prefix cache then. "
              "Default: a new one, which the report names.")
@_json_option
def serve(url: str | None, grpc_target: str | None, model: str | None, api: str, text: bool, api_key: str | None,
          request_rate: float | None, concurrency: int | None, conversations: int, input_tokens: Any,
          output_tokens: Any, turns: int, think_time: float, shared_prefix: int, prefixes: int, dataset: Path | None,
          vocab_size: int, sampling: dict[str, Any], our_fields: bool | None, slo: dict[str, float] | None,
          timeout: float | None, warmup: int, seed: int | None, json_file: Path | None) -> None:
    """Load on a server that runs: time to the first token (TTFT), per token after it (TPOT), between tokens (ITL),
    of whole requests (E2E), throughput, and goodput under --slo. The exit code is 1 if no request ended well.
    """
    if (url is None) == (grpc_target is None):
        raise click.UsageError("give either --url or --grpc")
    if request_rate is not None and concurrency is not None:
        raise click.UsageError("--request-rate is an open loop and --concurrency a closed one: give one of them")
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(f"bench serve needs aiohttp: {how_to_install('bench')}")
    from tqdm import tqdm

    from jaxserve.bench import serve as benchmark
    from jaxserve.bench.serve_load import Synthetic, read_dataset
    from jaxserve.bench.serve_targets import GrpcTarget, OpenAITarget
    kind = "messages" if api == "chat" else "text" if text else "ids"
    if seed is None:
        seed = time.time_ns() % 2**32
    synthetic = Synthetic(kind=kind, input_tokens=input_tokens, output_tokens=output_tokens, turns=turns,
                          shared_prefix=shared_prefix, prefixes=prefixes, vocab_size=vocab_size)
    workload = f"{conversations} x {synthetic}"
    load = synthetic.conversations(warmup + conversations, seed)
    if dataset is not None:
        load = read_dataset(dataset, kind, output_tokens, seed)
        load, workload = (load * -(-(warmup + conversations) // len(load)))[:warmup + conversations], dataset.name
    target = (GrpcTarget(grpc_target, kind=kind, api_key=api_key, sampling=sampling) if grpc_target is not None else
              OpenAITarget(url or "", kind=kind, model=model, api_key=api_key, sampling=sampling,
                           our_fields=our_fields))
    arrivals = benchmark.Closed(concurrency or 16) if request_rate is None else benchmark.Poisson(request_rate)
    with tqdm(total=sum(map(len, load[warmup:])), unit="request", disable=None) as bar:
        report = benchmark.serve(target, load[warmup:], arrivals, warmup=load[:warmup], workload=workload, slos=slo,
                                 seed=seed, think_time=think_time, timeout=timeout, on_done=lambda _: bar.update())
    _finish(report, json_file)
    sys.exit(0 if report.facts["requests that ended well"] else 1)
