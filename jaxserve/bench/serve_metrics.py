"""What a load run measured: from the recorded times of requests to latencies, throughput and goodput.

Pure functions over `Exchange`, so that the definitions can be read and tested apart from any clock:

- TTFT: from the moment the request should have been sent to its first tokens.
- E2E: the same to its last tokens.
- TPOT, one a request: (E2E - TTFT) / (tokens - 1). The first token is not in it; undefined for one token.
- ITL, pooled over all requests: the gap before a chunk of n tokens counts as n gaps of gap / n, so that a server
  that sends two tokens at a time looks neither slower nor faster than one that sends each.
- Goodput: requests that met every SLO, per second. A failed request meets none.

Open loop: a request's clock starts when it was scheduled, not when the client got round to sending it. So a server
that stalls is charged for all who came meanwhile (no coordinated omission), and so is a client that is too slow,
which `send lag` shows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PERCENTILES = (50, 90, 95, 99)


class Chunk(NamedTuple):
    """Tokens that arrived together. `tokens` is None where the server did not say how many."""

    at: float
    tokens: int | None


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are seconds of one monotonic clock.

    Attributes:
        scheduled, sent: when it should have been, and when it was handed to the connection.
        chunks: arrivals of at least one token.
        text, token_ids: the answer; token_ids is None if the server did not tell.
        prompt_tokens, cached_tokens, completion_tokens: the server's own counts, None if it gave none.
        error: kind of its failure ("HTTP 429", "timeout", ...), None if it ended well.
    """

    scheduled: float
    sent: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0].at - self.scheduled

    @property
    def e2e(self) -> float:
        return self.chunks[-1].at - self.scheduled

    @property
    def num_tokens(self) -> float:
        """Tokens of the answer: counted chunk by chunk, else the server's count, else one a chunk."""
        return sum(self.tokens_by_chunk())

    @property
    def tpot(self) -> float | None:
        tokens = self.num_tokens
        return (self.e2e - self.ttft) / (tokens - 1) if tokens > 1 else None

    def tokens_by_chunk(self) -> list[float]:
        """Where chunks are not counted, the server's total is spread over them evenly."""
        if all(chunk.tokens is not None for chunk in self.chunks):
            return [float(chunk.tokens or 0) for chunk in self.chunks]
        total = len(self.chunks) if self.completion_tokens is None else self.completion_tokens
        return [total / len(self.chunks)] * len(self.chunks)

    def gaps(self) -> list[tuple[float, float]]:
        """(seconds per token, tokens) of each chunk but the first."""
        counts = self.tokens_by_chunk()
        return [((chunk.at - before.at) / count, count)
                for before, chunk, count in zip(self.chunks, self.chunks[1:], counts[1:]) if count]


@dataclass(frozen=True)
class Distribution:
    """Percentiles are samples (nearest rank). `weight`: what the samples stand for, such as tokens."""

    mean: float
    percentiles: dict[int, float]
    max: float
    weight: float

    @classmethod
    def of(cls, samples: Iterable[tuple[float, float]]) -> Distribution | None:
        """Of (value, weight); None if there are none."""
        ordered = sorted(samples)
        total = sum(weight for _, weight in ordered)
        if not ordered or total <= 0:
            return None
        found: dict[int, float] = {}
        passed, wanted = 0.0, list(PERCENTILES)
        for value, weight in ordered:
            passed += weight
            while wanted and passed * 100 >= wanted[0] * total * (1 - 1e-12):
                found[wanted.pop(0)] = value
        mean = sum(value * weight for value, weight in ordered) / total
        return cls(mean, found, ordered[-1][0], total)

    def scaled(self, factor: float) -> dict[str, float]:
        return {"mean": self.mean * factor, **{f"p{rank}": value * factor for rank, value in self.percentiles.items()},
                "max": self.max * factor}


_SLO = re.compile(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)(ms|s)")


def parse_slos(text: str) -> dict[str, float]:
    """`ttft=300ms,tpot=50ms,e2e=10s` as seconds. Raises ValueError."""
    slos: dict[str, float] = {}
    for part in text.split(","):
        match = _SLO.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is none of ttft=, tpot=, e2e= with a number and its unit, such as ttft=300ms")
        name, number, unit = match.groups()
        slos[name] = float(number) / (1000 if unit == "ms" else 1)
    return slos


def meets(exchange: Exchange, slos: Mapping[str, float]) -> bool:
    """Whether a request kept to every bound. A TPOT that is undefined keeps to any."""
    if exchange.error is not None or not exchange.chunks:
        return False
    measured = {"ttft": exchange.ttft, "e2e": exchange.e2e, "tpot": exchange.tpot or 0.0}
    return all(measured[name] <= bound for name, bound in slos.items())


@dataclass(frozen=True)
class LoadMetrics:
    """A run's numbers. Latencies are those of requests that ended well; tokens of failed ones count for nothing.

    Attributes:
        duration: from the first scheduled moment to the last token, seconds.
        ttft, tpot, itl, e2e, send_lag: seconds; None where nothing was measured.
        prompt_tokens, cached_tokens: None unless the server counts them.
        counted: whether the tokens of every chunk are known; if not, ITL rests on an even spread.
        errors: failed requests by kind.
        goodput: None without SLOs.
    """

    num_requests: int
    duration: float
    output_tokens: float
    prompt_tokens: int | None
    cached_tokens: int | None
    counted: bool
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    send_lag: Distribution | None
    errors: dict[str, int]
    num_good: int | None

    @property
    def num_done(self) -> int:
        return self.num_requests - sum(self.errors.values())

    @property
    def requests_per_second(self) -> float:
        return self.num_done / self.duration if self.duration else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.duration if self.duration else 0.0

    @property
    def goodput(self) -> float | None:
        if self.num_good is None:
            return None
        return self.num_good / self.duration if self.duration else 0.0


def measure(exchanges: Sequence[Exchange], slos: Mapping[str, float] | None = None) -> LoadMetrics:
    """The numbers of a run's requests. An answer without a token is a failure ("no tokens")."""
    errors = Counter(exchange.error or "no tokens" for exchange in exchanges if not _done(exchange))
    done = [exchange for exchange in exchanges if _done(exchange)]
    ends = [exchange.chunks[-1].at for exchange in exchanges if exchange.chunks]
    start = min((exchange.scheduled for exchange in exchanges), default=0.0)

    def each(values: Iterable[float]) -> Distribution | None:
        return Distribution.of((value, 1.0) for value in values)

    return LoadMetrics(
        num_requests=len(exchanges), duration=max(ends, default=start) - start,
        output_tokens=sum(exchange.num_tokens for exchange in done),
        prompt_tokens=_total(exchange.prompt_tokens for exchange in done),
        cached_tokens=_total(exchange.cached_tokens for exchange in done),
        counted=all(chunk.tokens is not None for exchange in done for chunk in exchange.chunks),
        ttft=each(exchange.ttft for exchange in done), e2e=each(exchange.e2e for exchange in done),
        tpot=each(tpot for exchange in done if (tpot := exchange.tpot) is not None),
        itl=Distribution.of(gap for exchange in done for gap in exchange.gaps()),
        send_lag=each(exchange.sent - exchange.scheduled for exchange in done), errors=dict(errors),
        num_good=None if not slos else sum(meets(exchange, slos) for exchange in exchanges))


def _done(exchange: Exchange) -> bool:
    return exchange.error is None and bool(exchange.chunks)


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
