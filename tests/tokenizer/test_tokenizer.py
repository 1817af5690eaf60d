"""Text to ids and back, from every kind of tokenizer directory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from jaxserve.errors import CheckpointError, RequestError
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.tiny_tokenizers import SPECIAL, TEMPLATE, byte_level, byte_level_backend

TEXTS = ("Hello, world!", "  two  spaces\n\n\ttab", "def f(x):\n    return x ** 2  # 12345",
         "naïve café “quotes” …", "日本語のテキスト 中文 한국어", "👩‍👩‍👧 🎉 🏳️‍🌈", "a\0b", "")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(text):
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False,
                            spaces_between_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "😀\ud83d"])
def test_lone_surrogates_are_refused(text):
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D") as error:
        byte_level().encode(text)
    assert error.value.param == "prompt"


def test_bos_is_added_once_and_only_when_asked():
    tokenizer = byte_level(bos=True)
    bos = tokenizer.token_to_id("<s>")
    assert tokenizer.encode("hi")[0] == bos
    assert tokenizer.encode("hi").count(bos) == 1
    assert bos not in tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("") == [bos]
    assert byte_level().encode("") == []


def test_added_tokens_count_in_the_vocabulary():
    tokenizer = byte_level()
    think = tokenizer.token_to_id("<think>")
    assert think is not None and tokenizer.vocab_size == think + 1
    assert tokenizer.encode("<think>") == [think]
    assert tokenizer.decode([think]) == "<think>"  # added, but not special
    assert tokenizer.id_to_token(think) == "<think>"
    assert tokenizer.convert_ids_to_tokens([think, tokenizer.vocab_size]) == ["<think>", None]


def test_ids_beyond_the_vocabulary_decode_to_nothing():
    tokenizer = byte_level()
    ids = tokenizer.encode("abc")
    assert tokenizer.decode([ids[0], tokenizer.vocab_size + 60, *ids[1:]]) == "abc"


def test_special_tokens_are_left_out_or_shown():
    tokenizer = byte_level()
    ids = tokenizer.encode("<s>a</s></s><think>b<|tool|>")
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, False, False) == "<s>a</s></s><think>b<|tool|>"
    assert tokenizer.decode(ids, False, True) == "<s>a</s> </s><think>b<|tool|>"
    assert tokenizer.special_ids == {tokenizer.token_to_id(t) for t in ("<s>", "</s>", "<|tool|>")}


def test_a_role_makes_a_token_special():
    backend = byte_level_backend()
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<think>", "pad_token": "<nowhere>"})
    assert tokenizer.eos_ids == {backend.token_to_id("<think>")}
    assert tokenizer.decode(tokenizer.encode("a<think>")) == "a"
    assert tokenizer.token_to_id("<nowhere>") is None  # no new id without an embedding


def test_tokenizer_without_eos():
    assert Tokenizer(byte_level_backend()).eos_ids == frozenset()


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("abcdef")) == 6


def write_tokenizer(directory, backend, **config):
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | config))


def test_directory_with_tokenizer_json(tmp_path):
    write_tokenizer(tmp_path, byte_level_backend(bos=True), chat_template=TEMPLATE,
                    eos_token={"content": "</s>", "special": True})
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == byte_level(bos=True).encode(text)
    assert tokenizer.eos_ids == {tokenizer.token_to_id("</s>")}
    assert tokenizer.chat_templates == {"default": TEMPLATE}


def test_directory_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, byte_level_backend(bos=True, corpus=TEXTS * 3), chat_template=TEMPLATE,
                    tokenizer_class="PreTrainedTokenizerFast")
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.vocab_size == len(theirs)
    for text in (*TEXTS, "<s>x</s><think>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert ours.encode(ours.render_chat(messages), add_special_tokens=False) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False)


def test_add_bos_token_overrules_the_post_processor(tmp_path):
    write_tokenizer(tmp_path, byte_level_backend(bos=True), add_bos_token=False)
    assert Tokenizer.from_directory(tmp_path).encode("a") == byte_level().encode("a")
    write_tokenizer(tmp_path, byte_level_backend(bos=False), add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == ["<s>", "a", "</s>"]


def test_special_tokens_map_fills_in(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    assert Tokenizer.from_directory(tmp_path).special_tokens == SPECIAL


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_model_equals_sentencepiece(tmp_path, legacy):
    corpus = [*TEXTS[:4], "the quick brown fox jumps over the lazy dog", "hello hello world"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        hard_vocab_limit=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "legacy": legacy}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert tokenizer.vocab_size == reference.vocab_size()
    for text in ("hello world", "The quick, brown fox!", "naïve 日本 🎉", "a\nb"):
        ids = tokenizer.encode(text)
        assert ids == [reference.bos_id(), *reference.encode(text)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == {reference.eos_id()}


def test_saved_and_read_again(tmp_path):
    original = Tokenizer(byte_level_backend(bos=True), special_tokens=SPECIAL, eos_ids=[3],
                         chat_templates={"default": TEMPLATE, "tool_use": "tools"})
    original.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    for attribute in ("vocab_size", "eos_ids", "special_ids", "special_tokens", "chat_templates"):
        assert getattr(again, attribute) == getattr(original, attribute)
    assert again.encode("<s>ü 1") == original.encode("<s>ü 1")


def test_directory_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_named(tmp_path, file):
    write_tokenizer(tmp_path, byte_level_backend())
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointError, match=file):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("change, message", [
    ({"eos_token": 5}, 'eos_token must be a text or an object with a text "content", got 5'),
    ({"bos_token": {"content": None}}, "bos_token must be a text or an object"),
    ({"pad_token": ["<pad>"]}, "pad_token must be a text or an object"),
    ({"eos_token_ids": 1.5}, "eos_token_ids must be a token id or a list of token ids, got 1.5"),
    ({"eos_token_ids": [{"id": 3}]}, "eos_token_ids must be a token id or a list"),
    ({"chat_template": [1]}, r"chat_template must be a text or a list of objects .* got \[1\]"),
    ({"chat_template": [{"name": "default"}]}, "chat_template must be a text or a list of objects"),
    ({"chat_template": {"default": "x"}}, "chat_template must be a text or a list of objects"),
])
def test_entries_of_the_wrong_kind_are_named(tmp_path, change, message):
    write_tokenizer(tmp_path, byte_level_backend(), **change)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_chat_template_that_is_no_text(tmp_path):
    write_tokenizer(tmp_path, byte_level_backend())
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match="chat_template.jinja is not UTF-8 text: .* at byte 3"):
        Tokenizer.from_directory(tmp_path)


def test_post_processors_of_other_kinds_are_kept(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    write_tokenizer(tmp_path, backend)
    assert Tokenizer.from_directory(tmp_path).encode("a b") == byte_level().encode("a b")


def test_importing_and_encoding_needs_neither_transformers_nor_jax(tmp_path):
    write_tokenizer(tmp_path, byte_level_backend())
    script = ("import sys, pathlib; from jaxserve.tokenizer import Tokenizer; "
              "Tokenizer.from_directory(pathlib.Path(sys.argv[1])).encode('a'); "
              "print(sorted({'transformers', 'torch', 'jax', 'flax', 'gguf'} & sys.modules.keys()))")
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
