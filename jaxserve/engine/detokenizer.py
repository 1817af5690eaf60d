"""Ids to text, one sequence at a time and one token at a time.

The text of a sequence is defined once, for streams and for whole results alike: join the bytes that each
generated id adds to a text, and read them as UTF-8, where each maximal invalid or unfinished sequence
becomes one U+FFFD (the rule of the Unicode standard, section 3.9, and of Python's "replace"). Hence:

* Only generated ids count. A prompt that ends inside a character leaves nothing over for the output.
* An id adds what it adds behind other text: sentencepiece's leading space stays, so prompt + text is
  the whole text.
* An unfinished character is never shown. It is U+FFFD only once the bytes prove wrong or the sequence ends.
* For byte-level tokenizers this equals `tokenizer.decode(ids)`. For byte-fallback tokenizers it equals it
  (but for a stripped first space) wherever the bytes are valid; tokenizers' own decoder replaces whole
  runs of byte tokens when one is wrong, valid ones before it too, which no stream could follow.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxserve.engine.stop_strings import StopMatcher, StopStrings


class TextTokenizer(Protocol):
    """What it takes to tell each id's text. `decode` must not clean up spaces before punctuation."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


_UTF8 = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if printable in Latin-1, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _token_bytes(token: str) -> bytes:
    """The bytes behind a vocabulary entry that is no whole text of its own: `<0xE4>` or byte-level."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(char in _BYTE_LEVEL for char in token):
        return bytes(_BYTE_LEVEL[char] for char in token)
    return token.encode()


class TokenTexts:
    """What each id adds to a text. One per tokenizer, shared by all sequences; each id is decoded once."""

    def __init__(self, tokenizer: TextTokenizer):
        self.special_ids = tokenizer.special_ids
        self._tokenizer = tokenizer
        self._pieces: dict[int, str | bytes] = {}
        # Decoders treat the first token of a text apart (its space is dropped), so ids are decoded
        # behind this one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = tokenizer.decode(self._anchor)

    def piece(self, token_id: int) -> str | bytes:
        """The id's text, or its bytes if they are not whole characters. "" for ids that the tokenizer
        does not know (rows of the embedding beyond its vocabulary)."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def text(self, token_id: int) -> str:
        """The id's text on its own, U+FFFD for parts of characters; special tokens are shown."""
        piece = self.piece(token_id)
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def special_after(self, previous: int, token_id: int, spaces: bool) -> str:
        """Text that a shown special token adds behind another one, with the tokenizer's space or without."""
        both = self._tokenizer.decode(
            [previous, token_id], skip_special_tokens=False, spaces_between_special_tokens=spaces)
        return both[len(self.text(previous)):]

    def _make_piece(self, token_id: int) -> str | bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if token_id in self.special_ids:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        text = self._tokenizer.decode([*self._anchor, token_id])[len(self._anchor_text):]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        data = _token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class TextUpdate(NamedTuple):
    """`text`: new text to show. `num_ids`: how many of the ids count; those after a stop string's last
    one do not. `stop`: the stop string that was met."""

    text: str
    num_ids: int
    stop: str | None


class Detokenizer:
    """One sequence's text. Feed it the generated ids whose text is to be shown, then `finish`.

    The cost of an id does not depend on the length of the sequence: a table look-up, and at most three
    bytes and one stop string's beginning are remembered.

    Stop strings that are completed within the first `min_tokens` ids do not count.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._texts = texts
        self._matcher = StopMatcher(stops, include_stop) if stops is not None else None
        self._ids_before_stop = min_tokens
        self._skip_special = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._last_special: int | None = None  # the previous id, if it was special and shown
        self._utf8 = _UTF8("replace")
        self._inside_char = False

    def update(self, ids: Sequence[int]) -> TextUpdate:
        """Reads new ids. After a stop string nothing more may be fed."""
        shown = []
        for count, token_id in enumerate(ids, 1):
            text = self._read(token_id)
            if self._matcher is None:
                shown.append(text)
                continue
            self._ids_before_stop -= 1
            text, stop = self._matcher.feed(text, active=self._ids_before_stop < 0)
            shown.append(text)
            if stop is not None:
                self._utf8.reset()
                self._inside_char = False
                return TextUpdate("".join(shown), count, stop)
        return TextUpdate("".join(shown), len(ids), None)

    def finish(self) -> str:
        """What is still held when the sequence ends, in whatever way. An unfinished character becomes
        U+FFFD, which is not matched against stop strings any more."""
        held = self._matcher.flush() if self._matcher is not None else ""
        self._inside_char = False
        return held + self._utf8.decode(b"", True)

    def _read(self, token_id: int) -> str:
        """Whole characters that are complete with this id."""
        if token_id in self._texts.special_ids:
            if self._skip_special:
                return ""
            piece = self._special(token_id)
        else:
            piece = self._texts.piece(token_id)
            self._last_special = None
        if isinstance(piece, str):
            if not self._inside_char:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._inside_char = bool(self._utf8.getstate()[0])
        return text

    def _special(self, token_id: int) -> str:
        previous, self._last_special = self._last_special, token_id
        if previous is None:
            return self._texts.text(token_id)
        return self._texts.special_after(previous, token_id, self._spaces)
