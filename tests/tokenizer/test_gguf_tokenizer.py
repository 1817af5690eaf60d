"""The tokenizer inside a GGUF gives the ids of the tokenizer it was made from."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, RequestError, UnsupportedModelError
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.gguf_file import read_gguf_file
from tests.weights.tiny import add_value, finish

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CORPUS = ("Hello, world! It's 2024 and you're here, aren't you?", "  two  spaces\n\n\ttab   12345 67",
          "def f(x):\n    return x ** 2  # comment", "naïve café “quotes” … ÉTÉ été", "日本語 中文 한국어",
          "camelCaseWords AndMore HTTPServer")
TEXTS = (*CORPUS, "👩‍👩‍👧 🎉🏳️‍🌈", "x  1  22\r\n\r\n3", "<|im_start|>user\nhi<|im_end|>", "a<think>b</think>  c",
         "e\u0301 é", "", " ", "\n \n")

# The pre-tokenizers as the published tokenizer.json files spell them.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                       pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "tekken": split(TEKKEN),
}


def byte_level_reference(pre):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    backend.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>"])
    return backend


def write(path, metadata):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add_value(writer, key, value)
    finish(writer)
    return path


def gguf_of(backend, pre, **extra):
    """Metadata as llama.cpp's converter writes it for a byte-level tokenizer."""
    stored = json.loads(backend.to_str())
    tokens = [token for token, _ in sorted(backend.get_vocab(True).items(), key=lambda item: item[1])]
    kinds = {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in stored["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"), **extra}


def read(tmp_path, metadata):
    return Tokenizer.from_gguf(read_gguf_file(write(tmp_path / "t.gguf", metadata)).metadata)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_ids_equal_the_original(pre, tmp_path):
    reference = byte_level_reference(pre)
    tokenizer = read(tmp_path, gguf_of(reference, pre, **{"tokenizer.ggml.add_bos_token": False}))
    assert tokenizer.vocab_size == reference.get_vocab_size(True)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids, text
        assert tokenizer.decode(ids, False, False) == reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.special_ids == {reference.token_to_id(t) for t in ("<|begin|>", "<|im_start|>", "<|im_end|>")}
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(("pre", "flag", "expected"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)])
def test_bos_by_default_or_as_the_file_says(pre, flag, expected, tmp_path):
    extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = read(tmp_path, gguf_of(byte_level_reference(pre), pre, **extra))
    assert (tokenizer.encode("a")[0] == tokenizer.token_to_id(tokenizer.special_tokens["bos_token"])) is expected


def test_end_of_turn_tokens_end_a_generation(tmp_path):
    reference = byte_level_reference("gpt-2")
    metadata = gguf_of(reference, "gpt-2") | {"tokenizer.ggml.eos_token_id": reference.token_to_id("<|begin|>")}
    # <|im_end|> is known by name; eot by its id.
    tokenizer = read(tmp_path, metadata | {"tokenizer.ggml.eot_token_id": 7})
    assert tokenizer.eos_ids == {reference.token_to_id("<|begin|>"), reference.token_to_id("<|im_end|>"), 7}


def test_chat_templates_come_from_the_file_and_are_not_made_up(tmp_path):
    metadata = gguf_of(byte_level_reference("gpt-2"), "gpt-2")
    with pytest.raises(RequestError, match="no chat template"):
        read(tmp_path, metadata).render_chat([{"role": "user", "content": "x"}])
    templates = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
                 "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = read(tmp_path, metadata | templates)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|begin|>x"
    assert tokenizer.chat_templates["tool_use"] == "tools"


def train_sentencepiece(directory, **options):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, "the quick brown fox", "hello hello world"] * 10), vocab_size=360,
        model_prefix=str(directory / "sp"), model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, hard_vocab_limit=False, **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "sp.model"))


def sentencepiece_metadata(reference, **extra):
    ids = range(reference.vocab_size())
    kinds = [UNKNOWN if reference.is_unknown(i) else CONTROL if reference.is_control(i)
             else BYTE if reference.is_byte(i) else NORMAL for i in ids]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(reference.get_score(i)) for i in ids], "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": reference.bos_id(), "tokenizer.ggml.eos_token_id": reference.eos_id(),
        "tokenizer.ggml.unknown_token_id": reference.unk_id(), **extra}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_sentencepiece(prefix, tmp_path):
    reference = train_sentencepiece(tmp_path, add_dummy_prefix=prefix)
    tokenizer = read(tmp_path, sentencepiece_metadata(reference, **{"tokenizer.ggml.add_space_prefix": prefix}))
    assert tokenizer.vocab_size == reference.vocab_size()
    for text in (*CORPUS, "The quick, brown fox!", "emoji 🎉 and 漢字", "a  b   c\n\nd"):
        assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {reference.eos_id()}


def test_sentencepiece_user_defined_tokens_stay_whole(tmp_path):
    reference = train_sentencepiece(tmp_path, add_dummy_prefix=False, user_defined_symbols=["<sep>", "\n\n"])
    metadata = sentencepiece_metadata(reference, **{"tokenizer.ggml.add_space_prefix": False})
    for symbol in ("<sep>", "\n\n"):
        metadata["tokenizer.ggml.token_type"][reference.piece_to_id(symbol)] = USER_DEFINED
    tokenizer = read(tmp_path, metadata)
    for text in ("hello<sep>world", "a\n\nb", "<sep>\n\n"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "kind 'bert'; supported: gpt2, llama"),
    ({"tokenizer.ggml.pre": "martian"}, UnsupportedModelError, "pre-tokenizer 'martian'.*supported: gpt-2"),
    ({"tokenizer.ggml.merges": None}, CheckpointError, "no merges"),
    ({"tokenizer.ggml.merges": ["zzz yyy"]}, CheckpointError, "merges do not fit its vocabulary"),
    ({"tokenizer.ggml.tokens": None}, CheckpointError, "no tokenizer"),
    ({"tokenizer.ggml.token_type": np.array([1, 2])}, CheckpointError, "but 2 token types"),
])
def test_metadata_that_makes_no_tokenizer(change, error, message):
    metadata = gguf_of(byte_level_reference("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"])
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf({k: v for k, v in (metadata | change).items() if v is not None})
