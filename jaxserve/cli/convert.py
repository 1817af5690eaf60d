"""`jaxserve convert`: any checkpoint to an Orbax checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import given, options_of
from jaxserve.config import EngineConfig


@click.command(short_help="Convert a checkpoint to an Orbax checkpoint.")
@click.argument("model")
@click.argument("outdir", type=click.Path(path_type=Path))
@options_of(EngineConfig, without={"seed"})
def convert(model: str, outdir: Path, **options: Any) -> None:
    """Load MODEL and write it to OUTDIR as an Orbax checkpoint with its tokenizer.

    OUTDIR is then a MODEL itself. --dtype is the precision of the stored weights.
    """
    raise NotImplementedError
