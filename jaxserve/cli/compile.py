"""`jaxserve compile`: fill the compilation cache, so that engines start without compiling."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError


@click.command(name="compile", cls=SectionedCommand, short_help="Compile an engine's programs ahead, into the cache.")
@click.argument("model")
@options_of(EngineConfig, without=("seed", "compile_mode"))
def compile(model: str, **options: Any) -> None:
    """Compile all programs that an engine of MODEL with these options can need, for this machine's device.

    They are kept in --compilation-cache-dir, where an engine with the same options, jax version and kind of device
    finds them. No weights are loaded. It must run where the engine is going to: what the compilers make of a TPU
    or GPU that is not here (jaxserve plan) cannot be put into the cache.
    """
    from jaxserve.runtime.compilation_cache import cache_directory
    from jaxserve.runtime.devices import default_device
    from jaxserve.runtime.executables import Executables
    from jaxserve.runtime.planning import plan_engine, resolve_dtype
    from jaxserve.weights.source import open_model

    config = EngineConfig(**given(EngineConfig, options))
    directory = cache_directory(config.compilation_cache_dir)
    if directory is None:
        raise ConfigError(f"compilation_cache_dir={config.compilation_cache_dir!r}: compiled programs would not be "
                          f"kept; give a directory that can be written to")
    source, device = open_model(model, config.max_model_len), default_device()
    plan = plan_engine(source.spec, resolve_dtype(config.dtype, source.dtype, device), config, source.valid_vocab,
                       device)
    executables = Executables(plan.lower, config.compilation_cache_dir)

    def done(key: Hashable) -> None:
        how = "in the cache" if key in executables.from_cache else "compiled"
        click.echo(f"{how:<12}  {executables.seconds[key]:6.2f} s  {key}")

    started = time.perf_counter()
    executables.compile_all(plan.programs, done)
    hits = len(executables.from_cache)
    click.echo(f"{len(executables)} programs for {device.device_kind} in {time.perf_counter() - started:.1f} s: "
               f"{len(executables) - hits} compiled, {hits} in the cache at {directory}")
    all_usable = plan.config.max_num_seqs * plan.config.max_pages_per_seq + 1
    if config.num_pages is None and plan.config.num_pages < all_usable:
        click.echo(f"They are for a KV pool of {plan.config.num_pages} pages ({plan.pool_reason}). With other memory "
                   f"in use the pool may differ, and an engine would compile anew; --num-pages "
                   f"{plan.config.num_pages} fixes it.")
