"""What serving costs: a server's speed beside the offline LLM's, on the same requests and the same machine.

    python scripts/serving_speed.py [MODEL] [--repetitions N] [-- ENGINE OPTIONS]

Both engines are alive during the whole run and take turns, so that a machine that gets slower is slower for both. In
each repetition, with fresh token ids:

- saturation: the 32 requests of `bench throughput` at once; output tokens per second, and the ratio to offline.
- one stream: 128 tokens in, 128 out; time to the first token and per token, and what serving adds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve import LLM, SamplingParams  # noqa: E402
from jaxserve.bench.serve import Closed, drive  # noqa: E402
from jaxserve.bench.serve_load import Turn  # noqa: E402
from jaxserve.bench.serve_metrics import LoadMetrics, measure  # noqa: E402
from jaxserve.bench.serve_targets import GrpcTarget, OpenAITarget, Target  # noqa: E402
from jaxserve.bench.workloads import Batch, repetition  # noqa: E402


def offline(llm: LLM, batch: Batch) -> tuple[float, float, list[float]]:
    """Seconds in all, to the first token, and between tokens, as a user of `LLM.stream` sees them."""
    if len(batch.prompts) > 1:
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch.prompts],
                               [params(count) for count in batch.max_tokens], use_tqdm=False)
        total = time.perf_counter() - start
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch.output_tokens
        return total, 0.0, []
    start = time.perf_counter()
    times = [time.perf_counter() for event in llm.stream({"prompt_token_ids": batch.prompts[0]},
                                                         params(batch.max_tokens[0])) if event.token_ids]
    return times[-1] - start, times[0] - start, [later - earlier for earlier, later in zip(times, times[1:])]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def served(target: Target, batch: Batch) -> LoadMetrics:
    async def run() -> LoadMetrics:
        async with target:
            conversations = [[Turn(ids, count)] for ids, count in zip(batch.prompts, batch.max_tokens)]
            return measure(await drive(target, conversations, Closed(len(conversations))))

    metrics = asyncio.run(run())
    assert not metrics.errors and metrics.output_tokens == batch.output_tokens, metrics.errors
    return metrics


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", choices=("saturation", "stream"))
    parser.add_argument("--faces", default="http,grpc")
    parser.add_argument("engine", nargs="*", metavar="NAME=VALUE", help="engine options, after --")
    args = parser.parse_args()
    options = dict(option.lstrip("-").split("=", 1) for option in args.engine)
    ports = {"http": free_port(), "grpc": free_port()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the server with it
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve.py")), args.model, f"--port={ports['http']}",
         f"--grpc-port={ports['grpc']}", *(f"--{name}={value}" for name, value in options.items())],
        stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "service: ready" in line:
                break
        targets = {"http": lambda: OpenAITarget(f"http://127.0.0.1:{ports['http']}"),
                   "grpc": lambda: GrpcTarget(f"127.0.0.1:{ports['grpc']}")}
        targets = {name: targets[name] for name in args.faces.split(",")}
        typed = {name: int(value) if value.isdecimal() else value for name, value in options.items()}
        with LLM(args.model, compile_mode="eager", **typed) as llm:
            if args.only != "stream":
                saturation(llm, targets, args.repetitions)
            if args.only != "saturation":
                one_stream(llm, targets, args.repetitions)
    finally:
        server.terminate()
        server.wait()


def saturation(llm: LLM, targets: dict, repetitions: int) -> None:
    warm = repetition(0).mixed.first(8)
    offline(llm, warm)
    for make in targets.values():
        served(make(), warm)
    ratios: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(repetitions):
        # No face may find the other's prompts in the server's prefix cache.
        alone = offline(llm, repetition(1 + number * 3).mixed)[0]
        print(f"offline: {alone:.2f} s, {4264 / alone:.1f} output tok/s", flush=True)
        for i, (name, make) in enumerate(targets.items()):
            metrics = served(make(), repetition(2 + i + number * 3).mixed)
            ratios[name].append(alone / metrics.duration)
            print(f"{name}: {metrics.duration:.2f} s, {metrics.output_tokens_per_second:.1f} output tok/s, "
                  f"{ratios[name][-1]:.3f} of offline", flush=True)
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.3f} of offline throughput (median)")


def one_stream(llm: LLM, targets: dict, repetitions: int) -> None:
    offline(llm, repetition(0).stream)
    for make in targets.values():
        served(make(), repetition(0).first_token)
    firsts: dict[str, list[float]] = {name: [] for name in ("offline", *targets)}
    gaps: dict[str, list[float]] = {name: [] for name in ("offline", *targets)}
    for number in range(repetitions):
        _, first, between = offline(llm, repetition(1 + number * 3).stream)
        firsts["offline"].append(first)
        gaps["offline"].append(statistics.mean(between))
        for i, (name, make) in enumerate(targets.items()):
            metrics = served(make(), repetition(2 + i + number * 3).stream)
            assert metrics.ttft is not None and metrics.itl is not None
            firsts[name].append(metrics.ttft.mean)
            gaps[name].append(metrics.itl.mean)
    first_alone, gap_alone = statistics.median(firsts["offline"]), statistics.median(gaps["offline"])
    for name in firsts:
        first, gap = statistics.median(firsts[name]), statistics.median(gaps[name])
        print(f"{name}: first token {1e3 * first:.1f} ms ({1e3 * (first - first_alone):+.1f}), "
              f"per token {1e3 * gap:.2f} ms ({1e3 * (gap - gap_alone):+.2f})")


if __name__ == "__main__":
    main()
