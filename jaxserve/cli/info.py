"""`jaxserve info`: versions, devices, and what a model would need."""

from __future__ import annotations

import click


@click.command(short_help="Versions and devices.")
def info() -> None:
    """Show versions and devices."""
