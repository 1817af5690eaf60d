"""`jaxserve chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from jaxserve.cli.options import SectionedCommand, given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import JaxserveError
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from jaxserve import LLM

HELP = """\
/system TEXT  start anew with another system prompt
/reset        forget the conversation
/help         show this
/exit         leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said of it stays in the conversation."""


@click.command(cls=SectionedCommand, short_help="Chat in the terminal.")
@click.argument("model")
@click.option("--system", help="System prompt.")
@options_of(SamplingParams, without=("n", "logprobs", "prompt_logprobs"))
@options_of(EngineConfig, without=("seed",))
def chat(model: str, system: str | None, **options: Any) -> None:
    """Chat with MODEL. The answers stream; earlier turns come from the prefix cache.

    When standard input is not a terminal, each of its lines is a message, only the answers are printed, and the exit
    code is 1 if one was refused.
    """
    params = SamplingParams(**given(SamplingParams, options))
    from rich.console import Console

    from jaxserve import LLM
    with LLM(model, **given(EngineConfig, options)) as llm:
        chat = Chat(llm, params, system, Console(highlight=False), interactive=sys.stdin.isatty())
        chat.run()
    if chat.num_refused and not chat.interactive:
        sys.exit(1)


class Chat:
    """One conversation and its terminal.

    The conversation only ever holds whole turns: a message whose answer failed, or was stopped before its
    first word, is dropped.

    Attributes:
        num_refused: messages whose answer failed.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, console: Console, *,
                 interactive: bool):
        self.llm = llm
        self.params = params
        self.console = console
        self.interactive = interactive
        self.num_refused = 0
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []

    def run(self) -> None:
        if self.interactive:
            import readline  # noqa: F401  (line editing and history for input())
            self._note("/help lists the commands")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self.say(line)

    def _read(self) -> str | None:
        """The next line, or None at the end of the input."""
        while True:
            try:
                return input("> " if self.interactive else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")
            except UnicodeDecodeError as error:
                raise click.UsageError(f"standard input is not UTF-8 text (byte {error.object[error.start]:#04x} where "
                                       "a character should begin)") from None

    def _command(self, line: str) -> bool:
        """Carries out a command; False ends the chat."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.reset(self.system)
                self._note("the conversation is empty")
            case "/system":
                self.reset(rest.strip() or None)
                self._note("the conversation is empty")
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"there is no {name}; /help lists the commands")
        return True

    def say(self, message: str) -> None:
        """Streams the answer to `message` and adds both to the conversation."""
        turns = [*self.turns, {"role": "user", "content": message}]
        text, output = "", None
        try:
            with contextlib.closing(self.llm.stream_chat(turns, self.params)) as stream:
                for event in stream:
                    text += event.text
                    output = event.output
                    self.console.print(event.text, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            self._note("\nstopped", end="")
        except JaxserveError as error:
            self.num_refused += 1
            if self.interactive:
                self.console.print(f"error: {error}", style="red", markup=False)
            else:
                click.echo(f"error: {error}", err=True)
            return
        self.console.print()
        if text:
            self.turns = [*turns, {"role": "assistant", "content": text}]
        if output is not None and self.interactive:
            self._note(statistics(output) + "\n")

    def _note(self, text: str, end: str = "\n") -> None:
        if self.interactive:
            self.console.print(text, style="dim", markup=False, end=end)


def statistics(output: RequestOutput) -> str:
    """One line on a finished answer: tokens, speed after the first token, time to it, cached tokens."""
    tokens = len(output.outputs[0].token_ids)
    parts = [f"{tokens} tokens"]
    first, total = output.timings.first_token, output.timings.total
    if first is not None and total is not None:
        if tokens > 1 and total > first:
            parts.append(f"{(tokens - 1) / (total - first):.1f} tok/s")
        parts.append(f"first after {first:.2f} s")
    parts.append(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached")
    return ", ".join(parts)
