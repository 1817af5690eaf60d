"""`jaxserve serve`: HTTP and gRPC servers over one engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError, how_to_install
from jaxserve.serving.config import ServeConfig, read_config_file
from jaxserve.serving.logs import use_format

logger = logging.getLogger(__name__)

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
        raise ConfigError(f"serving needs {', '.join(missing)}: {how_to_install('serve')}")

    use_format(config.log_format)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; no progress bars between log lines
    from jaxserve.serving.lifecycle import serve as run
    try:
        sys.exit(run(model, engine, config))
    except JaxserveError as error:
        if config.log_format != "json":
            raise
        logger.error("%s", error)  # so that this line, too, is JSON
        sys.exit(2)
