"""The `jaxserve` command and how its errors look.

Nothing here or in the command modules imports jax, transformers or rich at module level, so that `--help`
and usage errors answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import signal
import sys
from typing import Any

import click

from jaxserve.cli.bench import bench
from jaxserve.cli.chat import chat
from jaxserve.cli.compile import compile
from jaxserve.cli.convert import convert
from jaxserve.cli.generate import generate
from jaxserve.cli.info import info
from jaxserve.cli.plan import plan
from jaxserve.cli.run_batch import run_batch
from jaxserve.cli.serve import serve
from jaxserve.errors import JaxserveError

CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    # Options can be typed with the names they have in Python, too.
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


_INTERRUPTED = 128 + signal.SIGINT  # as shells have it
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, or a quota


class _EchoHandler(logging.Handler):
    """Shows what the library logs, as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _show_log(level: int) -> None:
    """Until the command ends."""
    logger, handler, before = logging.getLogger("jaxserve"), _EchoHandler(), logging.getLogger("jaxserve").propagate
    logger.setLevel(level)
    logger.addHandler(handler)
    logger.propagate = False  # some libraries (absl) give the root logger a handler, and lines would come twice

    def undo() -> None:
        logger.removeHandler(handler)
        logger.propagate = before

    click.get_current_context().call_on_close(undo)


class _UserError(click.ClickException):
    """A JaxserveError as one line on stderr; exit code 2 like click's own usage errors."""

    exit_code = 2


def _drop_output() -> None:
    """What is left in buffers goes nowhere, instead of failing once more as the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):  # a test's output is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Cli(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JaxserveError as error:
            raise _UserError(" ".join(str(error).split())) from error
        except MemoryError as error:
            raise _UserError(f"memory ran out: {error}") from error
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
            _drop_output()
            raise _UserError(f"cannot write: {error.strerror}") from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(_INTERRUPTED) from None


@click.group(cls=_Cli, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="jaxserve")
@click.option("-q", "--quiet", is_flag=True, help="No progress messages on stderr.")
def main(quiet: bool) -> None:
    """LLM inference in JAX.

    MODEL is a hub id, a local Hugging Face directory, a .gguf file, an Orbax checkpoint directory, or "demo"
    (SmolLM2-135M-Instruct, fetched once).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is shown as JSON has it
        sys.stdout.reconfigure(errors="backslashreplace")
    _show_log(logging.WARNING if quiet else logging.INFO)


for command in (generate, chat, serve, run_batch, bench, info, plan, compile, convert):
    main.add_command(command)
