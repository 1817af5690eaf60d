"""`jaxserve plan`: would a model fit devices that are not here, and what would an engine there be?"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from jaxserve.capacity.known_models import KNOWN_MODELS
from jaxserve.cli.options import FiniteRange, SectionedCommand, given, options_of
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from jaxserve.capacity.jobs import Compiled
    from jaxserve.capacity.planner import Capacity, Share


@click.command(cls=SectionedCommand, short_help="Would a model fit a TPU or GPU that is not here?")
@click.option("--model", required=True,
              help=f"A config.json, the directory of one, any MODEL, or one of {', '.join(KNOWN_MODELS)}. "
                   "Weights are not needed.")
@click.option("--target", "target_name", required=True,
              help="tpu:KIND:TOPOLOGY (tpu:v5e:2x4), gpu:KINDxCOUNT (gpu:h100x8), or cpu for this machine.")
@click.option("--compile", "programs", type=click.Choice(["none", "largest", "all"]), default="largest",
              show_default=True, help="Which of the engine's programs are compiled, if the target's compiler is here.")
@click.option("--context", type=click.IntRange(min=1),
              help="Tokens in each sequence's context in the table of decode steps. Default: 1024, or max_model_len.")
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True,
              help="A batch in the table of decode steps. Repeatable. Default: powers of four up to max_num_seqs.")
@click.option("--gpu-memory-fraction", "gpu_fraction", type=FiniteRange(min=0, max=1, min_open=True),
              default=0.75, show_default=True,
              help="Share of a GPU's memory that jax takes: its XLA_PYTHON_CLIENT_MEM_FRACTION.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@options_of(EngineConfig, without=("seed",))
def plan(model: str, target_name: str, programs: Any, context: int | None, batches: tuple[int, ...],
         gpu_fraction: float, as_json: bool, **options: Any) -> None:
    """Plan an engine for devices that need not be here, from a model's config alone.

    The memory of a step comes from the target's own compiler if it is installed, which needs no device, else from an
    estimate. The exit code is 2 if the model does not fit and 1 if a program cannot be compiled.
    """
    from rich.console import Console

    from jaxserve.capacity.models import find_model
    from jaxserve.capacity.planner import plan_capacity
    from jaxserve.capacity.targets import parse_target

    target, config = parse_target(target_name), EngineConfig(**given(EngineConfig, options))
    progress = Console(stderr=True, highlight=False)
    capacity = plan_capacity(
        find_model(model, config.max_model_len), target, config, context=context, batches=batches, programs=programs,
        gpu_fraction=gpu_fraction,
        on_compiled=lambda program: progress.print(f"compiled {program.program} in {program.seconds:.1f} s"
                                                   if program.error is None else f"failed {program.program}"))
    if as_json:
        click.echo(json.dumps(as_dict(capacity), indent=2))
    else:
        show(capacity, Console(highlight=False))
    if any(program.error is not None for program in capacity.compiled):
        sys.exit(1)


def as_dict(capacity: Capacity) -> dict[str, Any]:
    """The plan as plain data. Bytes are of one device."""
    engine, config = capacity.engine, capacity.engine.config
    return {
        "model": capacity.model.description, "target": capacity.target.name, "device_kind": capacity.target.kind,
        "num_devices": capacity.target.num_devices, "dtype": capacity.dtype,
        "mesh": {"data": capacity.replicas, "tensor": capacity.share.degree},
        "temporaries_are": "compiled" if capacity.temps_are_compiled else "estimated",
        "compiler_missing": capacity.compiler_missing,
        "per_device": _share_dict(capacity.share),
        "degrees": [_share_dict(share) for share in capacity.shares],
        "kv_cache": {
            "bytes_per_token": capacity.kv_bytes_per_token, "page_size": config.page_size,
            "pages": config.num_pages, "tokens": capacity.share.num_tokens,
            "full_length_sequences": capacity.full_length_sequences},
        "engine": {
            "max_model_len": config.max_model_len, "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens, "backend": engine.step.backend,
            "backend_reason": engine.backend_reason, "buckets": [str(bucket) for bucket in engine.buckets]},
        "compiled": [dataclasses.asdict(program) for program in capacity.compiled],
        "decode_steps": [dataclasses.asdict(floor) | {"tokens_per_second": floor.tokens_per_second}
                         for floor in capacity.floors],
    }


def _share_dict(share: Share) -> dict[str, Any]:
    return dataclasses.asdict(share) | {"fits": share.fits}


def show(capacity: Capacity, console: Console) -> None:
    """The plan as tables."""
    from rich import box
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                     show_header=any(columns), show_edge=False)
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        return made

    share, config, target = capacity.share, capacity.engine.config, capacity.target
    several = target.num_devices > 1
    how = "compiled" if capacity.temps_are_compiled else "estimated"
    console.print(f"[bold]{capacity.model.description}[/bold] on [bold]{target.name}[/bold]: "
                  f"{target.num_devices} x {target.kind}, {capacity.dtype}")
    if several:
        console.print(f"It fits on {_devices(share.degree)}. Mesh: tensor={share.degree}, data={capacity.replicas}. "
                      "Numbers are of one tensor group, memory of one device, by arithmetic from one device's share; "
                      "jaxserve itself runs on one device today.")

    memory = table("Memory of one device", "", "", "")
    for name, num_bytes, note in (
            ("weights", share.weights_bytes, f"1/{share.degree} of each matrix" if share.degree > 1 else ""),
            ("largest step's temporaries", share.temp_bytes, how),
            ("sequences' ids and options", share.slots_bytes, ""),
            ("KV pool", share.pool_bytes, f"{share.pool_bytes / share.limit_bytes:.0%} of the device"),
            ("jax can use", share.limit_bytes, _limit_note(capacity))):
        memory.add_row(name, size(num_bytes), note)
    console.print(memory, "", sep="\n")

    pool = table("KV pool", "", "")
    for name, value in (
            ("pages", f"{share.num_pages:,} of {config.page_size} tokens"),
            ("tokens", f"{share.num_tokens:,}, {size(capacity.kv_bytes_per_token)} each"),
            (f"sequences of {config.max_model_len:,} tokens", f"{capacity.full_length_sequences:,}"),
            ("sequences at once (max_num_seqs)", f"{config.max_num_seqs:,}"),
            ("attention", capacity.engine.step.backend)):
        pool.add_row(name, value)
    console.print(pool, "", sep="\n")
    if len(capacity.shares) > 1:
        degrees = table("Degrees of tensor parallelism", "tensor", "weights", "temporaries", "KV pool", "tokens", "")
        for each in capacity.shares:
            degrees.add_row(str(each.degree), size(each.weights_bytes), size(each.temp_bytes),
                            size(each.pool_bytes) if each.fits else "-", f"{each.num_tokens:,}" if each.fits else "-",
                            "fits" if each.fits else f"{size(each.short_bytes)} too little")
        console.print(degrees, "", sep="\n")
    if capacity.floors:
        floors = table(f"Least time of a decode step, {capacity.floors[0].context:,} tokens of context "
                       "(data sheet; no engine reaches it)", "batch", "reads", "computes", "ms", "tokens/s", "bound by")
        for floor in capacity.floors:
            fits = floor.batch * floor.context <= share.num_tokens
            floors.add_row(str(floor.batch), size(floor.weights_bytes + floor.kv_bytes), f"{floor.flops / 1e9:,.0f} GF",
                           f"{floor.seconds * 1e3:.2f}", f"{floor.tokens_per_second:,.0f}",
                           floor.bound if fits else f"{floor.bound}; more than the pool holds")
        console.print(floors, "", sep="\n")
    console.print(f"Compiled shapes: {', '.join(map(str, capacity.engine.buckets))}")
    if capacity.compiled:
        _show_compiled(capacity.compiled, console, table)
    elif capacity.compiler_missing is not None:
        console.print(f"Estimated; the compiler for {target.name} is absent: {capacity.compiler_missing}",
                      style="yellow", markup=False, soft_wrap=True)


def _show_compiled(compiled: Any, console: Console, table: Any) -> None:
    programs = table("Compiled", "program", "s", "arguments", "temporaries", "pool in place")
    for program in compiled:
        if program.error is not None:
            programs.add_row(program.program, "failed", "", "", "")
            continue
        programs.add_row(program.program, f"{program.seconds:.1f}", size(program.argument_bytes),
                         size(program.temp_bytes), _in_place(program))
    console.print(programs, "", sep="\n")
    for program in compiled:
        if program.error is not None:
            console.print(f"{program.program}: {program.error}", style="red", markup=False, soft_wrap=True)


def _in_place(program: Compiled) -> str:
    if not program.pool_bytes:
        return ""
    return "no: the backend copies it" if program.pool_is_copied else "yes"


def _devices(degree: int) -> str:
    return "one device" if degree == 1 else f"{degree} devices"


def _limit_note(capacity: Capacity) -> str:
    chip = capacity.target.chip
    if chip is None:
        return "free RAM of this machine"
    if capacity.target.platform == "gpu":
        return f"of {size(chip.memory_bytes)}; see --gpu-memory-fraction"
    return ""


def size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"
