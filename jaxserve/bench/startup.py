"""Process start to first token: cold (nothing compiled before) and warm (the same again).

Every run is a new process that does what a user's program does, with a compilation cache directory that is
empty in the cold run. The weights' file is in the system's page cache in both: the cold run is about
compilation, not about the disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from jaxserve.bench import measure
from jaxserve.bench.report import Report
from jaxserve.bench.workloads import LAST_ID, repetition
from jaxserve.errors import EngineError

PHASES = ("import_s", "engine_s", "first_token_s")


def startup(model: str, options: dict[str, Any], repetitions: int = 3) -> Report:
    """Starts `repetitions` pairs of processes on `model` with the engine `options`."""
    report = Report("startup", "process start to first token of a 128 token prompt, new process each",
                    samples={}, model=model, options=options)
    # The first process of all also reads the weights from the disk; it is not counted.
    _start(model, options)
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as cache_dir:
            for temperature in ("cold", "warm"):
                with measure.Stopwatch() as watch:
                    phases = _start(model, {**options, "compilation_cache_dir": cache_dir})
                report.foreign_cpu.append(watch.foreign_cpu)
                for name, value in phases.items():
                    report.samples.setdefault(f"{temperature} {name}", []).append(value)
    report.facts["cold / warm"] = report.median("cold total_s") / report.median("warm total_s")
    return report


def _start(model: str, options: dict[str, Any]) -> dict[str, float]:
    """One process; seconds of its phases by its own clock, and `total_s` by ours."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "jaxserve.bench.startup", json.dumps({"model": model, "options": options})]
    with (tempfile.TemporaryFile("w+") as errors,
          subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process):
        assert process.stdout is not None
        line = process.stdout.readline()
        total = time.perf_counter() - start
        process.wait()
        errors.seek(0)
        reason = errors.read().strip().splitlines()[-1:] or ["no output"]
    if process.returncode != 0 or not line:
        raise EngineError(f"the measured process ended with exit code {process.returncode}: {reason[0]}")
    return {"total_s": total, **json.loads(line)}


def _first_token(model: str, options: dict[str, Any]) -> None:
    """Runs in the new process: prints its phases as one JSON line as soon as the first token is there."""
    marks = [time.perf_counter()]
    from jaxserve import LLM
    from jaxserve.bench.offline import greedy
    marks.append(time.perf_counter())
    with LLM(model, **options) as llm:
        marks.append(time.perf_counter())
        ids = repetition(1, min(llm.config.vocab_size, LAST_ID + 1)).first_token.prompts[0]
        llm.generate([{"prompt_token_ids": ids}], greedy(1), use_tqdm=False)
        marks.append(time.perf_counter())
        print(json.dumps(dict(zip(PHASES, (b - a for a, b in zip(marks, marks[1:]))))), flush=True)


if __name__ == "__main__":
    _first_token(**json.loads(sys.argv[1]))
