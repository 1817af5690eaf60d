"""`jaxserve info`: versions, devices, and what a model would take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.models.spec import DecoderSpec
    from jaxserve.runtime.programs import EnginePlan

Facts = dict[str, str]


@click.command(cls=SectionedCommand, short_help="Versions, devices, and what a model would take.")
@click.argument("model", required=False)
@options_of(EngineConfig, without=("seed",))
def info(model: str | None, **options: Any) -> None:
    """Show versions and devices. With MODEL also its shape, and the memory and compiled shapes that an engine
    with these options would have. No weights are loaded and nothing is computed.
    """
    sections = {"System": _system()}
    if model is not None:
        sections |= _model(model, EngineConfig(**given(EngineConfig, options)))
    for heading, facts in sections.items():
        click.secho(heading, bold=True)
        width = max(map(len, facts))
        for name, value in facts.items():
            click.echo(f"  {name:<{width}}  {value}")


def _system() -> Facts:
    from jaxserve.bench import measure
    from jaxserve.runtime.devices import all_devices
    env = measure.environment()
    facts = {"Python": f"{env['python']} ({env['platform']})", "CPU": f"{env['cpu']}, {env['cpus']} usable"}
    facts |= env["versions"]
    for device in all_devices():
        stats = device.memory_stats() or {}
        memory = f", {_size(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        facts[f"device {device.id}"] = f"{device.platform}, {device.device_kind}{memory}"
        if device.platform == "cpu":
            facts["native kernels"] = _native_kernels()
    return facts


def _native_kernels() -> str:
    from kernels_pallas import cpu_native
    try:
        return f"compiled by {cpu_native.compiled_by()}"
    except cpu_native.Unavailable as error:
        return f"none: {error}"


def _model(model: str, config: EngineConfig) -> dict[str, Facts]:
    import jax

    from jaxserve.runtime.devices import default_device
    from jaxserve.runtime.planning import plan_engine, resolve_dtype
    from jaxserve.weights.source import open_model

    source, device = open_model(model, config.max_model_len), default_device()
    plan = plan_engine(source.spec, resolve_dtype(config.dtype, source.dtype, device), config, source.valid_vocab,
                       device)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.params))
    return {
        "Model": {"model": source.description, **_shape(source.spec), "parameters": f"{count / 1e6:,.0f} million"},
        "Engine": _engine(plan),
    }


def _shape(spec: DecoderSpec) -> Facts:
    windows = sorted({window for window in spec.layer_windows if window is not None})
    windowed = sum(window is not None for window in spec.layer_windows)
    return {
        "layers": str(spec.num_layers),
        "hidden size": f"{spec.hidden_size}, mlp {spec.mlp_size}",
        "attention": f"{spec.num_heads} query heads, {spec.num_kv_heads} kv heads, head size {spec.head_dim}"
                     + (f", window of {windows} tokens in {windowed} layers" if windows else ""),
        "vocabulary": f"{spec.vocab_size:,}",
        "positions": f"{spec.max_position:,}",
    }


def _engine(plan: EnginePlan) -> Facts:
    config = plan.config
    tokens = (config.num_pages - 1) * config.page_size
    full_length = tokens // config.max_model_len
    return {
        "dtype": plan.params.embed.dtype.name,
        "max_model_len": f"{config.max_model_len:,}",
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "weights": _size(plan.weights_bytes),
        "sequences": f"{_size(plan.slots_bytes)} for their ids and options",
        "largest step": f"about {_size(plan.estimated_temp_bytes)} while it runs",
        "attention backend": f"{plan.step.backend} ({plan.backend_reason})",
        "KV pool": f"{_size(plan.pool_bytes)} in {plan.step.attention.dtype}: {config.num_pages:,} pages of "
                   f"{config.page_size} tokens, "
                   f"{full_length} sequences of full length",
        "compiled shapes": f"{len(plan.buckets)}: {', '.join(map(str, plan.buckets))}",
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
