"""From what the engine returns to the objects of the OpenAI API."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.outputs import Logprob, PositionLogprobs, RequestOutput
from jaxserve.serving.http.requests import Output
from jaxserve.serving.service import Service

Json = dict[str, Any]


def to_json(value: Any) -> bytes:
    # A lone surrogate, in an error that quotes the client, becomes \udXXX, which JSON allows.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def usage(outputs: Iterable[RequestOutput]) -> Json:
    """Of all prompts of one call. A prompt counts once, however many completions it has."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}


class TokenNames:
    """Tokens as logprobs show them."""

    def __init__(self, service: Service, output: Output, skip_special_tokens: bool):
        self._piece = service.token_piece
        self._as_ids = output.tokens_as_ids
        self._hidden = service.special_ids if skip_special_tokens else frozenset()

    def name(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_ids else entry.decoded or ""

    def bytes(self, token_id: int) -> bytes:
        """A token may be part of a character, which its text cannot show."""
        piece = self._piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def shown_bytes(self, token_id: int) -> bytes:
        """What it adds to the text."""
        return b"" if token_id in self._hidden else self.bytes(token_id)


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], k: int) -> Json:
    """The format of chat completions. `k`: top_logprobs; the sampled token stands there only if it is one of them."""
    def entry(token_id: int, logprob: Logprob) -> Json:
        return {"token": names.name(token_id, logprob), "logprob": logprob.logprob,
                "bytes": list(names.bytes(token_id))}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [entry(other, logprob) for other, logprob in list(position.items())[:k]]
        content.append(entry(token_id, position[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The format of completions, increment by increment: `text_offset` counts the characters before a token."""

    def __init__(self, names: TokenNames, offset: int = 0):
        self._names = names
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> Json:
        """`positions`: None for a prompt's first token, before which nothing predicts it."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            part["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._names.shown_bytes(token_id)))
            if position is None:
                part["tokens"].append(self._names.name(token_id, Logprob(0.0, 1, self._text(token_id))))
                part["token_logprobs"].append(None)
                part["top_logprobs"].append(None)
                continue
            top: dict[str, float] = {}
            for other, entry in position.items():  # best first: of two with the same text the better one is shown
                top.setdefault(self._names.name(other, entry), entry.logprob)
            part["tokens"].append(self._names.name(token_id, position[token_id]))
            part["token_logprobs"].append(position[token_id].logprob)
            part["top_logprobs"].append(top)
        return part

    def _text(self, token_id: int) -> str:
        return self._names.bytes(token_id).decode(errors="replace")


def prompt_logprobs(output: RequestOutput) -> list[Json | None] | None:
    """vLLM's format."""
    if output.prompt_logprobs is None:
        return None
    return [None if position is None else
            {str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded}
             for token_id, entry in position.items()} for position in output.prompt_logprobs]
