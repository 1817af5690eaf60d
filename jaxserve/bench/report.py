"""What a benchmark hands back, and how it is shown and kept."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.bench import measure


@dataclass
class Report:
    """One benchmark's result.

    Attributes:
        benchmark, workload: its name, and what was run in words.
        samples: for each quantity its value in each repetition; the name ends in its unit.
        facts: what was counted once: steps, compilations, ratios, memory.
        distributions: of quantities with many values in one run: mean, percentiles, max.
        requests: where single requests were measured, a row for each; in the JSON form only.
        foreign_cpu: for each timed call the cores that other processes used.
        model, options: what was run on, and the engine options given.
    """

    benchmark: str
    workload: str
    samples: dict[str, list[float]]
    facts: dict[str, float | int | str] = field(default_factory=dict)
    distributions: dict[str, dict[str, float]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    foreign_cpu: list[float | None] = field(default_factory=list)
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=measure.environment)

    def median(self, name: str) -> float:
        return measure.summary(self.samples[name])["median"]

    def as_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["metrics"] = {name: measure.summary(values) for name, values in data.pop("samples").items()}
        return data

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def print(self) -> None:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        def table(*headings: str) -> Table:
            table = Table("quantity")
            for heading in headings:
                table.add_column(heading, justify="right")
            return table

        console = Console(highlight=False)
        console.print(f"{self.benchmark}: {self.workload}", style="bold")
        if self.distributions:
            latencies = table(*next(iter(self.distributions.values())))
            for name, stats in self.distributions.items():
                latencies.add_row(name, *map(_number, stats.values()))
            console.print(latencies)
        numbers = table("median", "min", "max", "runs") if self.samples else table("value")
        for name, values in self.samples.items():
            stats = measure.summary(values)
            numbers.add_row(name, *(_number(stats[key]) for key in ("median", "min", "max")), str(len(values)))
        if self.samples and self.facts:
            numbers.add_section()
        for name, value in self.facts.items():
            numbers.add_row(name, _number(value))
        console.print(numbers)
        env = self.environment
        console.print(f"{self.model or 'no model'}, {env['cpu']} x {env['cpus']}, Python {env['python']}, "
                      f"jax {env['versions']['jax']}, {env['date']}", style="dim")
        load = [cores for cores in self.foreign_cpu if cores is not None]
        if load and max(load) > 0.15:
            console.print(f"other processes used up to {max(load):.1f} cores during the measurement", style="yellow")


def _number(value: float | int | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
