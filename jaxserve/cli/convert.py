"""`jaxserve convert`: any checkpoint to an Orbax checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import click

from jaxserve.errors import ConfigError


@click.command(short_help="Convert a checkpoint to an Orbax checkpoint.")
@click.argument("model")
@click.argument("outdir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
              help="Precision of the weights in OUTDIR. Default: as stored in MODEL; float32 for quantised ones.")
def convert(model: str, outdir: Path, dtype: str | None) -> None:
    """Write MODEL, with its configuration and tokenizer, to OUTDIR as an Orbax checkpoint.

    OUTDIR can then be given as a MODEL.
    """
    # Said before minutes of loading, not after.
    if outdir.exists() and not outdir.is_dir():  # click lets devices pass
        raise ConfigError(f"{outdir} is no directory; give one that is new or empty")
    if outdir.exists() and any(outdir.iterdir()):
        raise ConfigError(f"{outdir} is not empty; give a directory that is new or empty")
    from jaxserve.weights.source import open_model
    source = open_model(model)
    source.save(source.load(dtype or source.dtype or "float32"), outdir)
    click.echo(f"wrote {source.description} to {outdir}", err=True)
