"""`jaxserve convert`: any checkpoint to an Orbax checkpoint directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError


@click.command(cls=SectionedCommand, short_help="Convert a checkpoint to an Orbax checkpoint.")
@click.argument("model")
@click.argument("outdir", type=click.Path(path_type=Path))
@options_of(EngineConfig, without={f.name for f in dataclasses.fields(EngineConfig)} - {"dtype"})
def convert(model: str, outdir: Path, **options: Any) -> None:
    """Write MODEL, with its configuration and tokenizer, to OUTDIR as an Orbax checkpoint.

    OUTDIR can then be given as a MODEL. --dtype is the precision in which the weights are stored.
    """
    if outdir.exists() and any(outdir.iterdir()):
        raise ConfigError(f"{outdir} is not empty; give a directory that is new or empty")
    from jaxserve import LLM
    with LLM(model, **given(EngineConfig, options)) as llm:
        llm.save_checkpoint(outdir)
    click.echo(f"wrote {outdir}", err=True)
