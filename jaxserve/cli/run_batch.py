"""`jaxserve run-batch`: answer a file of the OpenAI batch API, offline."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from jaxserve.serving.batch import Task


@click.command("run-batch", cls=SectionedCommand, short_help="Answer a file of requests, offline.")
@click.option("-i", "--input-file", "source", type=click.File("rb"), required=True,
              help="JSON lines with custom_id, method, url and body. - is standard input.")
@click.option("-o", "--output-file", "target", type=click.Path(dir_okay=False, allow_dash=True), required=True,
              help="Answers and errors, one JSON line a request. - is standard output.")
@click.option("--model", required=True, help="The model, as for the other commands.")
@click.option("--served-model-name", help="What requests call the model. Default: as given.")
@click.option("--trust-request-chat-template", is_flag=True,
              help="Take chat templates from requests. A template is a program.")
@options_of(EngineConfig)
def run_batch(source: BinaryIO, target: str, model: str, served_model_name: str | None,
              trust_request_chat_template: bool, **options: Any) -> None:
    """Answer a file of requests, as the OpenAI batch API does: /v1/chat/completions, /v1/completions, /v1/responses.

    Answers come in the order in which they end; custom_id says whose they are. A wrong line gets an error line and
    stops no other. A file appears when all is done. The exit code is 1 if a line failed.
    """
    engine = given(EngineConfig, options)
    EngineConfig.from_options(engine)
    try:
        from jaxserve.serving.batch import read_tasks
    except ModuleNotFoundError as error:
        raise ConfigError(f"run-batch needs {error.name}: {how_to_install('serve')}") from None

    if not target:
        raise click.UsageError("--output-file is empty")
    from_file = source is not sys.stdin.buffer
    if from_file and target != "-" and Path(target).exists() and Path(target).samefile(source.name):
        raise click.UsageError(f"the answers would replace their requests: --output-file {target} is the input file")
    tasks = read_tasks(source)
    if not tasks:
        raise click.UsageError(f"{source.name} holds no requests")
    started = time.perf_counter()
    with _exit_when_terminated(), _output(target) as write:
        failed, tokens = _answer(tasks, write, model, served_model_name or model, trust_request_chat_template, engine)
    seconds = time.perf_counter() - started
    click.echo(f"{len(tasks)} requests, {failed} of them failed; {tokens} tokens in {seconds:.1f} s, loading included",
               err=True)
    if failed:
        sys.exit(1)


def _answer(tasks: list[Task], write: Callable[[bytes], Any], model: str, model_name: str, trust_templates: bool,
            engine: dict[str, Any]) -> tuple[int, int]:
    """Returns how many failed, and the number of generated tokens."""
    import asyncio

    from jaxserve import LLM
    from jaxserve.inputs import progress_bar
    from jaxserve.serving.batch import BatchRun
    from jaxserve.serving.service import Service

    async def main() -> BatchRun:
        service = Service(model_name=model_name, max_waiting_tokens=None)
        try:
            await service.start(llm)
            with progress_bar(len(tasks), sys.stderr.isatty()) as bar:
                def write_line(line: bytes) -> None:
                    write(line)
                    bar.update(1)

                batch = BatchRun(service, write_line, trust_templates=trust_templates)
                await batch.run(tasks)
                return batch
        finally:
            service.close()

    with LLM(model, **engine) as llm:
        batch = asyncio.run(main())
    return batch.num_failed, batch.num_tokens


@contextlib.contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """SIGTERM ends as an interrupt does, with everything tidied up on the way out."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _output(target: str) -> Iterator[Callable[[bytes], Any]]:
    """Where lines go: standard output, a pipe or a device at once; a file only if all goes well, in place of one that
    was there."""
    if target == "-":
        yield _at_once(sys.stdout.buffer)
        return
    path = Path(target)
    in_place = path.exists() and not path.is_file()  # a pipe or a device must not be replaced by a file
    partial = path if in_place else path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        file = partial.open("wb" if in_place else "xb")
    except OSError as error:
        raise ConfigError(f"cannot write to {path.parent}: {error}") from None
    if in_place:
        with file:
            yield _at_once(file)
        return
    try:
        with file:
            yield file.write
        partial.replace(path)
    except BaseException:
        partial.unlink()
        raise


def _at_once(file: BinaryIO) -> Callable[[bytes], Any]:
    def write(line: bytes) -> None:
        file.write(line)
        file.flush()

    return write
