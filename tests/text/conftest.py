"""Tiny tokenizers of the two kinds that matter for text: byte-level BPE and sentencepiece with byte fallback."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxserve.config import ResolvedConfig


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte 0..255, as the tokenizers library has it."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = {}
    for code in [*range(0x80), *range(0x80, 0x800)]:
        text = chr(code)
        for byte, char in zip(text.encode(), encoder.pre_tokenize_str(text)[0][0]):
            alphabet[byte] = char
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(alphabet.values()))
    # Bytes that no two-byte character has: their stand-ins ascend with them.
    alphabet |= dict(zip(sorted(set(range(256)) - alphabet.keys()), unused))
    return [alphabet[byte] for byte in range(256)]


class TextAdapter:
    """The face of a tokenizer that the engine sees, over the tokenizers library alone."""

    def __init__(self, backend: Tokenizer, eos: tuple[str, ...] = (), entry_bytes: tuple[bytes, ...] = ()):
        self.backend = backend
        self.entry_bytes = entry_bytes  # of the byte-level entries, by id
        self.vocab_size = max(backend.get_vocab().values()) + 1
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.eos_ids = frozenset(self.id(token) for token in eos)

    def id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def encode(self, text, add_special_tokens=True):
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        text = ""
        group: list[int] = []
        for i, token_id in enumerate(ids):
            group.append(token_id)
            last = i + 1 == len(ids)
            if last or (token_id in self.special_ids and ids[i + 1] in self.special_ids
                        and spaces_between_special_tokens and not skip_special_tokens):
                text += self.backend.decode(group, skip_special_tokens=skip_special_tokens) + ("" if last else " ")
                group = []
        return text

    def id_to_token(self, token_id):
        return self.backend.id_to_token(token_id)


def byte_level(extra: tuple[bytes, ...] = (), specials: tuple[str, ...] = ("<s>", "</s>"), bos: bool = False,
               eos: tuple[str, ...] = ("</s>",), merges=()) -> TextAdapter:
    """One token a byte (id = byte), then `extra` entries, merge results and special tokens."""
    alphabet = byte_alphabet()

    def spell(data: bytes) -> str:
        return "".join(alphabet[byte] for byte in data)

    entries = (*(bytes([byte]) for byte in range(256)), *extra, *(left + right for left, right in merges))
    backend = Tokenizer(models.BPE(
        {spell(entry): i for i, entry in enumerate(entries)},
        [(spell(left), spell(right)) for left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return TextAdapter(backend, eos, entries)


def sentencepiece(words: tuple[str, ...] = (), bos: bool = True) -> TextAdapter:
    """Unigram with byte fallback and a decoder that drops a text's first space, as Llama 2 has it."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [("\u2581", -9.0)] + [(letter, -10.0) for letter in letters]
    vocab += [(word, -5.0) for word in words]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TextAdapter(backend, ("</s>",))


@pytest.fixture(scope="session")
def make_byte_level():
    return byte_level


@pytest.fixture(scope="session")
def make_sentencepiece():
    return sentencepiece


@pytest.fixture(scope="session")
def byte_tokenizer() -> TextAdapter:
    """A byte a token, and some entries that hold parts of characters or several of them."""
    return byte_level(extra=(b"\xe4\xb8", b"\x82\xac", b"\xac!", b"\xf0\x9f", b"a\xe2", b"\xbf\xbd", b"hello",
                             b", beta gamma delta", "é".encode(), "\N{REPLACEMENT CHARACTER}".encode()))


@pytest.fixture(scope="session")
def sp_tokenizer() -> TextAdapter:
    return sentencepiece(words=("\u2581hello", "\u2581world", "ello", "\u2581the", "the"))


@pytest.fixture(scope="session")
def make_config():
    def make(**changes) -> ResolvedConfig:
        options = dict(
            max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, max_waiting_requests=8, page_size=8,
            num_pages=64, enable_prefix_caching=True, scheduling_policy="fcfs", decode_steps=1, deterministic=False,
            max_logprobs=20, query_block=8, vocab_size=512)
        return ResolvedConfig(**(options | changes))

    return make
