"""How long a text is at least, in tokens, without encoding it: so that a text that can never fit costs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

# Python's and Unicode's notion of white space: what tokenizers strip, or collapse.
_WHITE_SPACE = "".join(chr(point) for point in (
    *range(0x09, 0x0E), *range(0x1C, 0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
    0x3000))
# By how much a normalizer may lessen the number of characters. NFC and NFKC join up to four of them (a letter and its
# marks, such as U+1F82) and drop none.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_SPLITTERS = frozenset({"Split", "Punctuation"})  # they may remove what they split at
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Some tokenizers can make nothing of any amount of text: one unknown token of a thousand unknown characters, or of
# accents. Their texts may be so much longer than their tokens; nobody sends more of what says nothing.
_SLACK = 16


@dataclass(frozen=True)
class TokenBound:
    """What a tokenizer cannot do better than.

    Attributes:
        chars_per_token: most characters of a text that one token stands for.
        free: characters that may cost no token at all.
    """

    chars_per_token: int
    free: str = ""

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens."""
        num_chars = len(text) - sum(map(text.count, self.free))
        return -(-num_chars // self.chars_per_token)


def token_bound(backend: Backend) -> TokenBound:
    """From the parts of a tokenizer: each token stands for at most as many characters as the longest one is spelled
    with (a byte is spelled with one or more), unless something drops characters on the way."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    longest = max(map(len, vocabulary), default=1)
    normalizers, splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    byte_level = any(part["type"] == "ByteLevel" for part in normalizers + splitters)
    free = _dropped_characters(backend.model, vocabulary, byte_level=byte_level)
    shrinking = _shrinking(normalizers)
    if free is None or shrinking is None or not all(map(_keeps_all, splitters)):
        return TokenBound(longest * _SLACK)
    stripped = any(part["type"] == "Strip" for part in normalizers) or any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return TokenBound(longest * shrinking, "".join(sorted(free | set(_WHITE_SPACE if stripped else ""))))


def _parts(component: Any) -> list[dict[str, Any]]:
    """The description of a normalizer or pre-tokenizer, sequences taken apart."""
    if component is None:
        return []
    parts, found = [json.loads(component.__getstate__())], []
    while parts:
        part = parts.pop()
        inner = part.get("normalizers") or part.get("pretokenizers")
        (parts.extend(inner) if inner else found.append(part))
    return found


def _dropped_characters(model: Any, vocabulary: Mapping[str, int], *, byte_level: bool) -> set[str] | None:
    """Characters for which there is no token. None: not known, or many may become one token for what is unknown."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.byte_fallback:
        return set() if vocabulary.keys() >= _BYTE_TOKENS else None
    if not byte_level or model.unk_token is not None:
        return None
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    # U+0080 to U+00BF have the bytes that everything beyond ASCII ends in: if they are there no such character is lost.
    # Of ASCII, vocabularies that were learnt from texts lack some control characters.
    spelled = {point: spell(chr(point))[0][0][-1] for point in range(0xC0)}
    missing = {chr(point) for point, letter in spelled.items() if letter not in vocabulary}
    return missing if all(map(str.isascii, missing)) else None


def _shrinking(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """How many characters, white space that is stripped aside, become one. None: there is no limit."""
    factor = 1
    for part in normalizers:
        kind = part["type"]
        if kind == "Replace":
            pattern = part["pattern"].get("String")  # else a regular expression
            if pattern is None or len(pattern) > len(part["content"]):
                return None
        elif kind != "Strip":
            if kind not in _NORMALIZERS:
                return None
            factor *= _NORMALIZERS[kind]
    return factor


def _keeps_all(splitter: Mapping[str, Any]) -> bool:
    kind = splitter["type"]
    return kind in _PRE_TOKENIZERS or (kind in _SPLITTERS and splitter["behavior"] != "Removed")


def num_chars(value: Any, enough: int) -> int:
    """The characters of all texts in a JSON value, and one more for each item of its lists and objects. Beyond `enough`
    it stops counting."""
    total, left = 0, [value]
    while left and total <= enough:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping | list | tuple):
            total += len(item)
            if total <= enough:
                left += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
    return total
