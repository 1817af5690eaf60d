"""Tiny tokenizers of the two kinds that matter for text: byte-level BPE and sentencepiece with byte fallback."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.config import ResolvedConfig
from jaxserve.tokenizer import Tokenizer


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


class TinyTokenizer(Tokenizer):
    """A Tokenizer with its backend and, if byte-level, the bytes of its entries by id."""

    def __init__(self, backend: Backend, entry_bytes: tuple[bytes, ...] = (), **special_tokens: str):
        super().__init__(backend, special_tokens=special_tokens)
        self.backend = backend
        self.entry_bytes = entry_bytes


def byte_level(extra: tuple[bytes, ...] = (), merges: tuple[tuple[bytes, bytes], ...] = (), bos: bool = False,
               eos: bool = True) -> TinyTokenizer:
    """One token a byte (id = byte), then `extra` entries, merge results, <s> and </s>."""
    alphabet = byte_alphabet()

    def spell(data: bytes) -> str:
        return "".join(alphabet[byte] for byte in data)

    entries = (*(bytes([byte]) for byte in range(256)), *extra, *(left + right for left, right in merges))
    backend = Backend(models.BPE(
        {spell(entry): i for i, entry in enumerate(entries)},
        [(spell(left), spell(right)) for left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return TinyTokenizer(backend, entries, **({"eos_token": "</s>"} if eos else {}))


def sentencepiece(words: tuple[str, ...] = (), bos: bool = True) -> TinyTokenizer:
    """Unigram with byte fallback and a decoder that drops a text's first space, as Llama 2 has it."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [("\u2581", -9.0)] + [(letter, -10.0) for letter in letters]
    vocab += [(word, -5.0) for word in words]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TinyTokenizer(backend, eos_token="</s>")


@pytest.fixture(scope="session")
def make_byte_level():
    return byte_level


@pytest.fixture(scope="session")
def make_sentencepiece():
    return sentencepiece


@pytest.fixture(scope="session")
def byte_tokenizer() -> TinyTokenizer:
    """A byte a token, and some entries that hold parts of characters or several of them."""
    return byte_level(extra=(b"\xe4\xb8", b"\x82\xac", b"\xac!", b"\xf0\x9f", b"a\xe2", b"\xbf\xbd", b"hello",
                             b", beta gamma delta", "é".encode(), "\N{REPLACEMENT CHARACTER}".encode()))


@pytest.fixture(scope="session")
def sp_tokenizer() -> TinyTokenizer:
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
