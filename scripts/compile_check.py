"""Compiles the engine for TPUs and GPUs that are not here, with their real compilers, and fails where that is bad.

    python -m scripts.compile_check                         # all targets whose compiler is installed
    python -m scripts.compile_check --target tpu:v5e --model qwen3-0.6b --layers 1
    make check-kernels                                      # with environments of its own for both compilers

Two things are compiled, each for the largest decode step and the largest step of all: paged attention alone, and
the whole jitted step of the model with one layer and with all of them (as many as fit one device, if not all do).
Bad is: it does not compile; the donated KV pool is not updated in place, or an array of it is copied on the way;
temporaries of attention alone take more than a tenth of the pool; a Pallas kernel for CUDA spills registers. Nothing is
executed: this says nothing about speed or numbers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import click
from rich import box
from rich.console import Console
from rich.table import Table

from jaxserve.capacity import jobs
from jaxserve.capacity.footprint import first_layers
from jaxserve.capacity.known_models import KNOWN_MODELS
from jaxserve.capacity.models import Model, find_model
from jaxserve.capacity.planner import Capacity, plan_capacity
from jaxserve.capacity.targets import Target, parse_target
from jaxserve.config import EngineConfig, KvCacheDtype
from jaxserve.errors import OutOfMemoryError

TARGETS = {"tpu": ("tpu:v5e:1x1", "tpu:v6e:1x1", "tpu:v5p:1x1x1", "tpu:tpu7x:1x1x1"),
           "gpu": ("gpu:h100", "gpu:h200", "gpu:a100")}
# Their attention is all different: 4 query heads to a kv head of 128, 2 of 128, 2 of 256 with soft cap and windows.
STEP_MODELS = ("llama-3-8b", "qwen3-0.6b", "gemma-2-9b")
ATTENTION_MODELS = (*STEP_MODELS, "llama-3.2-1b")  # 4 of 64
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12",
            "nvidia-cuda-nvcc")

Part = Literal["attention", "step"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compiled program and what is wrong with it."""

    target: str
    model: str
    layers: str
    part: Part
    compiled: jobs.Compiled

    @property
    def fault(self) -> str | None:
        if self.compiled.error is not None:
            return self.compiled.error
        if self.compiled.pool_is_copied:
            return "the KV pool is copied"
        if self.part == "attention" and self.compiled.temp_bytes > 0.1 * self.compiled.pool_bytes:
            return "temporaries take more than a tenth of the KV pool"
        return f"{self.compiled.spills} bytes of registers spill" if self.compiled.spills else None


def job_of(model: Model, target: Target, part: Part, layers: str, config: EngineConfig, backend: str | None
           ) -> tuple[jobs.Job, str]:
    """The job, and how many of the model's layers it has."""
    total = model.spec.num_layers
    capacity, count = _fitting(model, target, config)
    num_pages = capacity.share.num_pages
    if layers == "1":  # with a pool as large as all layers', so that a copy of it stands out from the temporaries
        count, num_pages = 1, num_pages * count
    decode = [bucket for bucket in capacity.engine.buckets if not bucket.prefill_rows]
    programs = [max(buckets, key=lambda bucket: bucket.num_tokens) for buckets in (decode, capacity.engine.buckets)]
    job = jobs.Job(target=target.name, config=model.config, dtype=capacity.dtype, options=dataclasses.asdict(config),
                   num_pages=num_pages, programs=[str(program) for program in programs], part=part,
                   num_layers=count, backend=backend, kernel_use=True)
    return job, f"{count}/{total}"


def _fitting(model: Model, target: Target, config: EngineConfig) -> tuple[Capacity, int]:
    """The plan of the model's first layers, of the most that fit one device, and their number."""
    layers = model.spec.num_layers
    while True:
        cut = dataclasses.replace(model, spec=first_layers(model.spec, layers))
        try:
            return plan_capacity(cut, target, config, programs="none"), layers
        except OutOfMemoryError:
            if layers == 1:
                raise
            layers -= 1


def check(target: Target, models: Sequence[str], parts: Sequence[Part], depths: Sequence[str], config: EngineConfig,
          backend: str | None) -> Iterator[Row]:
    """Compiles for one target, one job after the other."""
    for part in parts:
        names = models or (ATTENTION_MODELS if part == "attention" else STEP_MODELS)
        for name in names:
            for layers in depths if part == "step" else ("all",):
                job, count = job_of(find_model(name, config.max_model_len), target, part, layers, config, backend)
                for compiled in jobs.run(job):
                    yield Row(target=target.name, model=name, layers=count if part == "step" else "", part=part,
                              compiled=compiled)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(("target", "model", "part", "layers", "program", "attention", "cpu s", "arguments",
                                "temp", "pool", "in place", "VMEM", "Pallas: registers", "spills", "smem",
                                "XLA: registers", "spills", "")):
        table.add_column(column, justify="left" if i < 6 else "right", no_wrap=True)
    for row in rows:
        compiled = row.compiled
        cells = [row.target, row.model, row.part, row.layers, compiled.program, compiled.backend]
        if compiled.error is None:
            cells += [f"{compiled.cpu_seconds:.1f}", _mib(compiled.argument_bytes), _mib(compiled.temp_bytes),
                      _mib(compiled.pool_bytes), "no" if compiled.pool_is_copied else "yes",
                      _mib(compiled.vmem_bytes) if compiled.vmem_bytes else ""]
            for ours in (True, False):
                kernels = [kernel for kernel in compiled.kernels if kernel.pallas == ours]
                most = {name: max((getattr(kernel, name) for kernel in kernels), default=0)
                        for name in ("registers", "spill_bytes", "shared_bytes")}
                used = [str(most["registers"]), str(most["spill_bytes"]), f"{most['shared_bytes'] / 1024:.0f} KiB"]
                cells += (used if ours else used[:2]) if kernels else [""] * (3 if ours else 2)
        else:
            cells += [""] * 11
        table.add_row(*cells, "ok" if row.fault is None else "FAILED", style=None if row.fault is None else "red")
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.2f} GiB"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def expand(names: Sequence[str]) -> list[Target]:
    """Targets by name; "tpu" and "gpu" are all of `TARGETS`, and of a TPU the kind is enough."""
    expanded: list[str] = []
    for name in names or TARGETS:
        kinds = {target.rpartition(":")[0]: target for target in TARGETS["tpu"]}
        expanded += TARGETS.get(name, (kinds.get(name, name),))
    return [parse_target(name) for name in dict.fromkeys(expanded)]


@click.command()
@click.option("--target", "names", multiple=True, help="tpu, gpu, tpu:v5e, gpu:h100, ... Repeatable. Default: all.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(KNOWN_MODELS)),
              help=f"Repeatable. Default: {', '.join(STEP_MODELS)}, and for attention alone llama-3.2-1b too.")
@click.option("--part", "parts", multiple=True, type=click.Choice(["attention", "step"]), help="Default: both.")
@click.option("--layers", "depths", multiple=True, type=click.Choice(["1", "all"]), help="Of steps. Default: both.")
@click.option("--backend", help="Attention backend. Default: the one that the engine takes on the target.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--kv-cache-dtype", type=click.Choice(get_args(KvCacheDtype)), default="auto", show_default=True,
              help="Of K and V in the pool.")
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--max-model-len", type=int, default=8192, show_default=True)
@click.option("--jobs", "workers", type=click.IntRange(min=1), default=1, show_default=True,
              help="Targets compiled at once.")
@click.option("--require", is_flag=True, help="A target whose compiler is not installed is a failure.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the rows here.")
def main(names: tuple[str, ...], models: tuple[str, ...], parts: tuple[Any, ...], depths: tuple[str, ...],
         backend: str | None, dtype: Any, kv_cache_dtype: Any, max_num_seqs: int, max_model_len: int,
         workers: int, require: bool, json_file: Path | None) -> None:
    """Compile every attention kernel and the whole step for TPUs and GPUs, on CPU only. Exit code 1: something is
    bad."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    config = EngineConfig(dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_num_seqs=max_num_seqs,
                          max_model_len=max_model_len)
    targets = expand(names)
    missing = {target.name: command for target in targets if (command := jobs.missing_compiler(target)) is not None}
    for name, command in missing.items():
        console.print(f"skipped {name}: its compiler is absent; {command}", markup=False)

    def rows_of(target: Target) -> list[Row]:
        rows = []
        for row in check(target, models, parts or ("attention", "step"), depths or ("1", "all"), config, backend):
            compiled = row.compiled
            console.print(f"{row.target} {row.model} {row.part} {row.layers} {compiled.program}: "
                          f"{row.fault or f'ok, {compiled.seconds:.1f} s'}", markup=False, soft_wrap=True)
            rows.append(row)
        return rows

    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(rows_of, [target for target in targets if target.name not in missing])
        rows = [row for of_target in found for row in of_target]
    console.print(", ".join(f"{name} {number}" for name, number in versions().items()))
    console.print(table_of(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(
            {"versions": versions(), "skipped": missing, "config": dataclasses.asdict(config),
             "rows": [dataclasses.asdict(row) | {"fault": row.fault} for row in rows]}, indent=2))
    faults = sum(row.fault is not None for row in rows)
    console.print(f"{len(rows)} programs compiled, {faults} of them bad, {len(missing)} targets skipped")
    sys.exit(1 if faults or (require and missing) else 0)


if __name__ == "__main__":
    main()
