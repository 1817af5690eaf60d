"""`jaxserve generate`: complete prompts and answer messages, once."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.outputs import PositionLogprobs, RequestOutput
from jaxserve.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256
MAX_PROMPT_FILE_BYTES = 256 << 20  # devices have no end


@click.command(cls=SectionedCommand, short_help="Complete prompts and answer messages.")
@click.argument("model")
@click.option("-p", "--prompt", "prompts", multiple=True, help="Text to continue. Repeatable.")
@click.option("-m", "--message", "messages", multiple=True,
              help="Message to answer, through the model's chat template. Repeatable; each is its own chat.")
@click.option("--system", help="System prompt of the messages.")
@click.option("--prompt-file", "prompt_files", multiple=True, type=click.File("rb"),
              help="File with one prompt a line; in a .jsonl file each line is a JSON string or a list of token "
                   "ids. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, with ids and timings.")
@options_of(SamplingParams)
@options_of(EngineConfig, without=("seed",))
def generate(model: str, prompts: tuple[str, ...], messages: tuple[str, ...], system: str | None,
             prompt_files: tuple[Any, ...], as_json: bool, **options: Any) -> None:
    """Complete prompts and answer messages with MODEL, batched, and print the results in order.

    Without a prompt or message, standard input is the prompt. On the command line --max-tokens defaults to
    256. The exit code is 1 if a prompt failed.
    """
    requests: list[str | list[int]] = [*prompts, *(line for file in prompt_files for line in _lines(file))]
    if not requests and not messages and not sys.stdin.isatty():
        text = _read(sys.stdin.buffer, "standard input").rstrip("\n")
        requests = [text] if text else []
    if not requests and not messages:
        raise click.UsageError("give a --prompt, a --message, a --prompt-file, or text on standard input")
    if system is not None and not messages:
        raise click.UsageError("--system needs a --message")

    shown_as_json = [name for name in ("logprobs", "prompt_logprobs") if name in given(SamplingParams, options)]
    if shown_as_json and not as_json:
        raise click.UsageError(f"--{shown_as_json[0].replace('_', '-')} needs --json, which shows them")

    params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **given(SamplingParams, options)})
    turns = [{"role": "system", "content": system}] if system is not None else []
    chats = [[*turns, {"role": "user", "content": message}] for message in messages]

    from jaxserve import LLM
    with LLM(model, **given(EngineConfig, options)) as llm:
        compiled_before = sum(llm.metrics()["compile_seconds"].values())
        start = time.perf_counter()
        show_bar = sys.stderr.isatty()
        outputs = llm.generate(requests, params, use_tqdm=show_bar) if requests else []
        answers = llm.chat(chats, params, use_tqdm=show_bar) if chats else []
        seconds = time.perf_counter() - start
        compiling = sum(llm.metrics()["compile_seconds"].values()) - compiled_before

    for output in outputs:
        _show(output, as_json, output.prompt or "")
    for message, output in zip(messages, answers):
        _show(output, as_json, f"> {message}\n")
    click.echo(_summary([*outputs, *answers], seconds, compiling), err=True)
    if any(output.error for output in [*outputs, *answers]):
        sys.exit(1)


def _read(file: BinaryIO, name: str) -> str:
    content = file.read(MAX_PROMPT_FILE_BYTES + 1)
    if len(content) > MAX_PROMPT_FILE_BYTES:
        raise click.UsageError(f"{name} has more than {MAX_PROMPT_FILE_BYTES >> 20} MiB; give it in parts")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text (byte {error.object[error.start]:#04x} where a character "
                               f"should begin); convert it, for example with iconv -t UTF-8") from None


def _lines(file: Any) -> list[str | list[int]]:
    lines = _read(file, file.name).split("\n")
    if Path(file.name).suffix != ".jsonl":
        return [line for line in lines if line]
    prompts: list[str | list[int]] = []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError):  # a number of very many digits, lists in lists in lists
            prompt = None
        if not isinstance(prompt, (str, list)):
            raise click.UsageError(f"{file.name}, line {number}: expected a JSON string or a list of token ids")
        prompts.append(prompt)
    return prompts


def _show(output: RequestOutput, as_json: bool, lead: str) -> None:
    if as_json:
        click.echo(json.dumps(record(output), ensure_ascii=False))
        return
    if output.error is not None:
        click.echo(f"{click.style(lead, dim=True)}\n{click.style(f'error: {output.error}', fg='red')}\n")
        return
    for completion in output.outputs:
        click.echo(f"{click.style(lead, dim=True)}{completion.text}\n")


def _summary(outputs: list[RequestOutput], seconds: float, compiling: float) -> str:
    """`compiling`: seconds of it that went into shapes met for the first time, or into finding them in the cache; the
    rate is without them."""
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    first_time = f", of which {compiling:.2f} s compiling or loading programs" if compiling else ""
    return (f"{len(outputs)} requests, {generated} tokens in {seconds:.2f} s{first_time}: "
            f"{generated / max(seconds - compiling, 1e-9):.1f} tok/s; "
            f"{cached} of {prompt} prompt tokens from the prefix cache")


def record(output: RequestOutput) -> dict[str, Any]:
    """A RequestOutput as JSON-ready data. Logprobs become lists, best first, of objects with `token_id`."""
    error = None if output.error is None else {"type": type(output.error).__name__, "message": str(output.error)}
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [{
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "cumulative_logprob": completion.cumulative_logprob,
            "logprobs": _logprob_lists(completion.logprobs),
        } for completion in output.outputs],
        "prompt_logprobs": _logprob_lists(output.prompt_logprobs),
        "num_cached_tokens": output.num_cached_tokens,
        "timings": dataclasses.asdict(output.timings),
        "error": error,
    }


def _logprob_lists(positions: list[PositionLogprobs] | list[PositionLogprobs | None] | None) -> list | None:
    if positions is None:
        return None
    return [None if entries is None else
            [{"token_id": token_id, **dataclasses.asdict(entry)} for token_id, entry in entries.items()]
            for entries in positions]
