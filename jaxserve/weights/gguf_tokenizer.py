"""The tokenizer that a GGUF file carries in its metadata, as a `tokenizers.Tokenizer`.

Two kinds of vocabulary: byte-level BPE ("gpt2") with a list of merges, whose pre-tokenizer is named by
`tokenizer.ggml.pre` (the names and their regular expressions are llama.cpp's, src/llama-vocab.cpp; here in
the spelling of the Hugging Face tokenizers they came from), and SentencePiece BPE ("llama") with scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError, UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Files from before `eot_token_id` do not say which token ends a turn; llama.cpp goes by these names.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _llama3_pattern(digits: str) -> str:
    return _CONTRACTIONS + "|" + _LEAD + r"\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES


def _cased_pattern(digits: str, contractions: str) -> str:
    return (f"{_LEAD}{_UPPER}*{_LOWER}+{contractions}|{_LEAD}{_UPPER}+{_LOWER}*{contractions}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES)


@dataclass(frozen=True, kw_only=True)
class _Pre:
    """How text is cut before the merges.

    Attributes:
        pattern: None for GPT-2's, which ByteLevel knows itself.
        single_digits: digits are cut off first, one by one.
        nfc: text is NFC-normalised.
        ignore_merges: a piece that is a token is taken whole, whatever the merges say.
        add_bos: default when the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = _Pre(pattern=_llama3_pattern(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre(pattern=_llama3_pattern(r"\p{N}"), nfc=True)
_PRE: dict[str, _Pre] = {
    "gpt-2": _Pre(), "smollm": _Pre(single_digits=True),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "smaug-bpe": _Pre(pattern=_LLAMA3.pattern),
    "qwen2": _QWEN2, "deepseek-r1-qwen": _Pre(pattern=_QWEN2.pattern),
    "tekken": _Pre(pattern=_cased_pattern(r"\p{N}", ""), ignore_merges=True, add_bos=True),
    "gpt-4o": _Pre(pattern=_cased_pattern(r"\p{N}{1,3}", _CONTRACTIONS + "?")),
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """`special_tokens`: by role ("bos_token" ...). `chat_templates`: by name, the main one is "default"."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    eos_ids: frozenset[int]
    chat_templates: dict[str, str]


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Builds the tokenizer that GGUF metadata describes.

    Raises:
        CheckpointError: the file has no vocabulary, or its lists do not fit each other.
        UnsupportedModelError: a kind of vocabulary or pre-tokenizer that is not supported.
    """
    reader = _Reader(metadata)
    kind = reader.get("model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(reader)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(reader), True
    else:
        raise UnsupportedModelError(f"the GGUF has a tokenizer of kind {kind!r}; supported: gpt2, llama")
    # Longest first is the backend's own rule, so the order of adding does not matter.
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in reader.of_type(_CONTROL)])
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in reader.of_type(_USER_DEFINED)])
    ids = {role: reader.token_id(name) for role, name in _NAMED.items()}
    special_tokens = {role: reader.tokens[i] for role, i in ids.items() if i is not None}
    _set_post_processor(
        backend, special_tokens, bool(reader.get("add_bos_token", add_bos)), bool(reader.get("add_eos_token", False)))
    return GGUFTokenizer(backend, special_tokens, reader.eos_ids(), _chat_templates(metadata))


class _Reader:
    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CheckpointError("the GGUF has no tokenizer (tokenizer.ggml.tokens is absent)")
        self.tokens: list[str] = tokens
        types = self.get("token_type")
        self.types = [_NORMAL] * len(tokens) if types is None else types.tolist()
        if len(self.types) != len(tokens):
            raise CheckpointError(f"the GGUF's tokenizer has {len(tokens)} tokens but {len(self.types)} token types")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def of_type(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]

    def token_id(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        return int(value) if value is not None and 0 <= int(value) < len(self.tokens) else None

    def eos_ids(self) -> frozenset[int]:
        ends = {self.token_id(name) for name in ("eos", "eot", "eom")}
        ends |= {i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
                 if kind == _CONTROL and token in _END_OF_TURN}
        return frozenset(end for end in ends if end is not None)

    def vocabulary(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def _byte_level(reader: _Reader) -> tuple[Tokenizer, bool]:
    name = reader.get("pre", "default")
    if name not in _PRE:
        raise UnsupportedModelError(
            f"the GGUF's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(_PRE)}")
    pre = _PRE[name]
    merges = reader.get("merges")
    if not isinstance(merges, list):
        raise CheckpointError("the GGUF's tokenizer has no merges (tokenizer.ggml.merges is absent)")
    try:
        model = models.BPE(vocab=reader.vocabulary(), merges=[_pair(merge) for merge in merges],
                           ignore_merges=pre.ignore_merges)
    except Exception as e:  # the library raises bare Exception for merges that are not in the vocabulary
        raise CheckpointError(f"the GGUF's merges do not fit its vocabulary: {e}") from None
    backend = Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(reader: _Reader) -> Tokenizer:
    """BPE whose merges are those that SentencePiece would do. It trains tokens in the order of their merges, so
    the token's id ranks it (the scores say the same, except in Gemma's files)."""
    normal = {token: i for i, (token, kind) in enumerate(zip(reader.tokens, reader.types, strict=True))
              if kind == _NORMAL}
    merges = sorted((i, token[:cut], token[cut:]) for token, i in normal.items() for cut in range(1, len(token))
                    if token[:cut] in normal and token[cut:] in normal)
    unknown = reader.token_id("unknown")
    backend = Tokenizer(models.BPE(
        vocab=reader.vocabulary(), merges=[(left, right) for _, left, right in merges], byte_fallback=True,
        fuse_unk=True, unk_token=reader.tokens[unknown] if unknown is not None else None))
    prefix = bool(reader.get("add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _set_post_processor(backend: Tokenizer, special_tokens: Mapping[str, str], add_bos: bool, add_eos: bool) -> None:
    bos = special_tokens.get("bos_token") if add_bos else None
    eos = special_tokens.get("eos_token") if add_eos else None
    if bos is None and eos is None:
        return
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None])


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): value for key, value in metadata.items() if key.startswith(prefix + ".")}
    default = metadata.get(prefix)
    return named | ({"default": default} if default else {})
