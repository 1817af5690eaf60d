"""Load on a running server: latencies and throughput as its clients see them.

Open loop (`Poisson`): conversations begin when chance says, whatever the server does, as users come. Closed loop
(`Closed`): so many conversations run at a time, which finds a server's throughput, but says little about latency: a
slow server gets less to do. serve_metrics.py has the definitions.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.report import Report
from jaxserve.bench.serve_load import Conversation, Prompt, continued, poisson_arrivals
from jaxserve.bench.serve_metrics import Exchange, LoadMetrics, measure
from jaxserve.bench.serve_targets import Target


@dataclass(frozen=True)
class Poisson:
    """Conversations that begin at random, `rate` a second on average."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} conversations a second (Poisson)"


@dataclass(frozen=True)
class Closed:
    """`concurrency` conversations at a time."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at a time"


async def drive(target: Target, conversations: Sequence[Conversation], arrivals: Poisson | Closed, *, seed: int = 0,
                think_time: float = 0.0, timeout: float | None = None,
                on_done: Callable[[Exchange], object] = lambda exchange: None) -> list[Exchange]:
    """Runs all conversations against an entered target, and returns their requests in the order of conversations.

    Args:
        seed: of the arrivals.
        think_time: seconds between an answer and the next turn.
        timeout: seconds from a request's scheduled moment; then it is cancelled ("timeout").
        on_done: called with each request that has ended.
    """
    clock = asyncio.get_running_loop().time
    exchanges: list[list[Exchange]] = [[] for _ in conversations]

    async def converse(number: int, scheduled: float) -> None:
        said: Prompt | None = None
        answer = Exchange(scheduled)
        for turn in conversations[number]:
            prompt = continued(said, answer.text, answer.token_ids, turn)
            said, answer = prompt, Exchange(scheduled)
            exchanges[number].append(answer)
            await _until(scheduled)
            try:
                async with asyncio.timeout_at(None if timeout is None else scheduled + timeout):
                    await target.send(prompt, turn.max_tokens, answer)
            except TimeoutError:
                answer.error = "timeout"
            on_done(answer)
            if answer.error is not None:
                return  # there is nothing to go on with
            scheduled = clock() + think_time

    try:
        async with asyncio.TaskGroup() as group:
            if isinstance(arrivals, Poisson):
                start = clock()
                for number, at in zip(range(len(conversations)), poisson_arrivals(arrivals.rate, seed)):
                    await _until(start + at)
                    group.create_task(converse(number, start + at))
            else:
                numbers = iter(range(len(conversations)))
                for _ in range(arrivals.concurrency):
                    group.create_task(_one_after_another(numbers, converse))
    except ExceptionGroup as faults:  # a request's failure is none: this is a wrong option, or a fault of ours
        raise faults.exceptions[0] from None
    return [exchange for conversation in exchanges for exchange in conversation]


async def _one_after_another(numbers: Iterator[int], converse: Callable[[int, float], Any]) -> None:
    for number in numbers:
        await converse(number, asyncio.get_running_loop().time())


async def _until(moment: float) -> None:
    delay = moment - asyncio.get_running_loop().time()
    if delay > 0:
        await asyncio.sleep(delay)


def serve(target: Target, conversations: Sequence[Conversation], arrivals: Poisson | Closed, *, workload: str,
          warmup: Sequence[Conversation] = (), slos: Mapping[str, float] | None = None, seed: int = 0,
          think_time: float = 0.0, timeout: float | None = None,
          on_done: Callable[[Exchange], object] = lambda exchange: None) -> Report:
    """Drives a server and reports. `warmup` runs first, one after the other, and is not counted; see `drive`."""

    async def run() -> tuple[list[Exchange], float, float]:
        async with target:
            await drive(target, warmup, Closed(1), timeout=timeout)
            cpu, start = _cpu_seconds(), time.perf_counter()
            exchanges = await drive(target, conversations, arrivals, seed=seed, think_time=think_time,
                                    timeout=timeout, on_done=on_done)
            return exchanges, _cpu_seconds() - cpu, time.perf_counter() - start

    exchanges, cpu, seconds = asyncio.run(run())
    metrics = measure(exchanges, slos)
    report = report_of(metrics, f"{workload}; {arrivals}; latencies from the scheduled moment")
    report.facts |= {"client's CPU (cores)": cpu / seconds, "seed": seed}
    report.model = target.name
    report.options = {"slos_s": dict(slos or {}), "think_time_s": think_time, "timeout_s": timeout}
    report.requests = [_row(exchange, exchanges[0].scheduled) for exchange in exchanges]
    return report


def report_of(metrics: LoadMetrics, workload: str) -> Report:
    """The table's content. Latencies are in ms."""
    report = Report("serve", workload, samples={})
    for name in ("ttft", "tpot", "itl", "e2e", "send_lag"):
        distribution = getattr(metrics, name)
        if distribution is not None:
            report.distributions[f"{name}_ms"] = distribution.scaled(1e3)
    facts: dict[str, Any] = {
        "requests": metrics.num_requests, "requests that ended well": metrics.num_done,
        "duration_s": metrics.duration, "requests per s": metrics.requests_per_second,
        "output tok/s": metrics.output_tokens_per_second, "output tokens": round(metrics.output_tokens)}
    if metrics.prompt_tokens is not None:
        facts["prompt tokens"] = metrics.prompt_tokens
        facts["all tok/s"] = (metrics.prompt_tokens + metrics.output_tokens) / metrics.duration
    if metrics.cached_tokens is not None:
        facts["cached prompt tokens"] = metrics.cached_tokens
    if metrics.goodput is not None:
        facts["goodput (requests per s within the SLOs)"] = metrics.goodput
        facts["share within the SLOs"] = (metrics.num_good or 0) / metrics.num_requests
    facts |= {f"failed: {kind}": count for kind, count in sorted(metrics.errors.items())}
    if not metrics.counted:
        facts["tokens of a chunk"] = "not told by the server: usage spread evenly"
    report.facts = facts
    return report


def _row(exchange: Exchange, start: float) -> dict[str, Any]:
    """One request for the JSON report; seconds since the first request's scheduled moment."""
    return {"scheduled": exchange.scheduled - start, "sent": exchange.sent - start,
            "chunks": [[chunk.at - start, chunk.tokens] for chunk in exchange.chunks],
            "prompt_tokens": exchange.prompt_tokens, "cached_tokens": exchange.cached_tokens,
            "completion_tokens": exchange.completion_tokens, "error": exchange.error}


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system
