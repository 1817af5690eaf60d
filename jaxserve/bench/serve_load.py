"""The load on a server: conversations of synthetic or given prompts, and when they arrive.

Synthetic prompts are random, so that no prefix cache can answer by accident, and repeatable by seed: a second run
with one seed against the same server finds its prompts in the cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxserve.bench.workloads import FIRST_ID, LAST_ID
from jaxserve.errors import ConfigError

PromptKind = Literal["ids", "text", "messages"]
Prompt = list[int] | str | list[dict[str, Any]]

# One token each, with the space before it, in the usual vocabularies.
_WORDS = ("time year people way day man thing woman life child world school state family student group country problem "
          "hand part place case week company system program question work government number night point home water "
          "room mother area money story fact month lot right study book eye job word business issue side kind head "
          "house service friend father power hour game line end member law car city community name").split()


_LONGEST = 1 << 20  # tokens, as of max_model_len


@dataclass(frozen=True)
class Turn:
    """What a conversation adds to what was said before, and how long the answer may be."""

    prompt: Prompt
    max_tokens: int


Conversation = list[Turn]


@dataclass(frozen=True)
class LengthRange:
    """Lengths, drawn evenly from both ends and what is between."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """`128` or `32-512`. Raises ValueError."""
        low, dash, high = text.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= _LONGEST):
            raise ValueError(f"{text!r} is neither a number of tokens, from 1 to {_LONGEST}, nor a range such as "
                             "32-512")
        return cls(int(low), int(high))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Random conversations.

    Attributes:
        kind: token ids are exact; words, of texts and messages, are about a token each.
        input_tokens, output_tokens: of each turn; the shared prefix comes on top.
        turns: requests of a conversation; each holds what was said before, with the server's answers.
        shared_prefix: first tokens of a conversation, the same for all with the same of `prefixes` prefixes.
        vocab_size: ids are below it.
    """

    kind: PromptKind = "ids"
    input_tokens: LengthRange = LengthRange(128, 128)
    output_tokens: LengthRange = LengthRange(128, 128)
    turns: int = 1
    shared_prefix: int = 0
    prefixes: int = 1
    vocab_size: int = LAST_ID + 1

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        rng = random.Random(seed)
        prefixes = [self._tokens(self.shared_prefix, rng) for _ in range(self.prefixes)]
        return [self._conversation(prefixes[i % self.prefixes], rng) for i in range(count)]

    def _conversation(self, prefix: list[Any], rng: random.Random) -> Conversation:
        turns = []
        for number in range(self.turns):
            tokens = self._tokens(self.input_tokens.draw(rng), rng)
            turns.append(Turn(self._prompt(tokens if number else prefix + tokens), self.output_tokens.draw(rng)))
        return turns

    def _tokens(self, count: int, rng: random.Random) -> list[Any]:
        if self.kind == "ids":
            end = min(LAST_ID + 1, self.vocab_size)
            start = min(FIRST_ID, end // 2)
            return [rng.randrange(start, end) for _ in range(count)]
        return [rng.choice(_WORDS) for _ in range(count)]

    def _prompt(self, tokens: list[Any]) -> Prompt:
        if self.kind == "ids":
            return tokens
        text = " ".join(tokens)
        return text if self.kind == "text" else [{"role": "user", "content": text}]

    def __str__(self) -> str:
        unit = "tokens" if self.kind == "ids" else "words"
        text = f"{self.input_tokens} {unit} in, {self.output_tokens} tokens out"
        if self.turns > 1:
            text += f", {self.turns} turns"
        if self.shared_prefix:
            text += f", {self.shared_prefix} {unit} shared by " + (
                "all" if self.prefixes == 1 else f"each of {self.prefixes} groups")
        return text


def read_dataset(path: Path, kind: PromptKind, output_tokens: LengthRange, seed: int) -> list[Conversation]:
    """JSON lines with `prompt` (a text or token ids) or `messages`, and `max_tokens` where it is not drawn from
    `output_tokens`. Raises ConfigError naming the line."""
    rng = random.Random(seed)
    conversations = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON's strings may hold its other ends
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if kind == "messages":
                prompt = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
            else:
                prompt = entry["prompt"]
            max_tokens = int(entry.get("max_tokens", output_tokens.draw(rng)))
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: expected a JSON object with "
                              f"{'messages or a prompt' if kind == 'messages' else 'a prompt'}, got {line[:80]!r} "
                              f"({type(error).__name__}: {error})") from None
        conversations.append([Turn(prompt, max_tokens)])
    if not conversations:
        raise ConfigError(f"{path} holds no prompt")
    return conversations


def continued(said: Prompt | None, answer_text: str, answer_ids: Sequence[int] | None, turn: Turn) -> Prompt:
    """A turn's whole prompt: what was `said` to the server last time, its answer, and what the turn adds."""
    new = turn.prompt
    if said is None:
        return new
    if isinstance(new, str):
        assert isinstance(said, str)
        return f"{said}{answer_text} {new}"
    if new and isinstance(new[0], dict):
        return [*said, {"role": "assistant", "content": answer_text}, *new]  # type: ignore[list-item]
    if answer_ids is None:
        raise ConfigError("several turns of token ids need the ids of the answers, which this server does not send; "
                          "use --api chat or --text")
    return [*said, *answer_ids, *new]  # type: ignore[list-item]


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start: arrivals that know nothing of each other, `rate` a second."""
    rng, at = random.Random(seed), 0.0
    while True:
        at += rng.expovariate(rate)
        yield at
