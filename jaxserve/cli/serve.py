"""`jaxserve serve`: HTTP and gRPC servers over one engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serving.config import ServeConfig, read_config_file

_PACKAGES = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus_client"}


@click.command(cls=SectionedCommand, short_help="Serve a model over HTTP and gRPC.")
@click.argument("model")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="YAML file with the options below, by the same names. What is given here counts more.")
@options_of(ServeConfig)
@options_of(EngineConfig)
def serve(model: str, config_file: Path | None, **options: Any) -> None:
    """Serve MODEL: the OpenAI API over HTTP, and gRPC, from one engine.

    Everything is compiled before the server is ready (--compile-mode lazy compiles what is met instead).
    SIGTERM lets running requests end. With port 0 a server is off.
    """
    engine, serving = ({}, {}) if config_file is None else read_config_file(config_file)
    engine = {"compile_mode": "eager"} | engine | given(EngineConfig, options)
    EngineConfig.from_options(engine)
    config = ServeConfig(**(serving | given(ServeConfig, options)))
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if config.grpc_port and importlib.util.find_spec("grpc") is None:
        missing.append("grpcio")
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'jaxserve[serve]'")

    from jaxserve.serving.lifecycle import serve as run
    sys.exit(run(model, engine, config))
