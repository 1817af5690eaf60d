"""Timing one call, and what must be known to believe a number: machine, versions, other load, memory."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class Stopwatch:
    """Measures a `with` block.

    Attributes (after the block):
        seconds: wall time.
        foreign_cpu: cores that other processes kept busy meanwhile, or None where the system does not say
            (it is read from /proc/stat). Above about 0.15 a time on a small machine means little.
    """

    seconds: float
    foreign_cpu: float | None

    def __enter__(self) -> Stopwatch:
        self._busy, self._own = _machine_cpu_seconds(), _own_cpu_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds = time.perf_counter() - self._start
        busy, own = _machine_cpu_seconds(), _own_cpu_seconds()
        self.foreign_cpu = None
        if busy is not None and self._busy is not None:
            self.foreign_cpu = max(0.0, (busy - self._busy) - (own - self._own)) / max(self.seconds, 1e-3)


def _own_cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _machine_cpu_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and range of `samples`, and the samples themselves."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "runs": list(samples)}


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def peak_memory_mb() -> float | None:
    """The process' highest resident set so far, in MB (10^6 bytes); None where it cannot be read."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def environment() -> dict[str, Any]:
    """Date, machine and versions, as data for a report. Starts no accelerator."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpus": available_cpus(),
        "versions": package_versions(),
    }


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_cpus() -> int:
    """CPUs this process may use (affinity included where the system knows it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def package_versions() -> dict[str, str]:
    found = {}
    for name in ("jaxserve", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
