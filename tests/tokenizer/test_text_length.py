"""A text's length says how many tokens it has at least; it never says too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.text_length import num_chars, token_bound
from tests.llm import tiny
from tests.tokenizer.tiny_tokenizers import byte_level_backend


def byte_level(normalizer=None, corpus=("e" * 40,), lost: str = "") -> Backend:
    backend = byte_level_backend(corpus=corpus)
    if lost:
        letters = set(pre_tokenizers.ByteLevel.alphabet()) - set(lost)
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def byte_fallback() -> Backend:
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257, "e": 258, "ee": 259}
    backend = Backend(models.BPE(vocabulary, [("e", "e")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def strips_after(token: str) -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken(token, rstrip=True)])
    return backend


def words() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "e": 1}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


KINDS = {
    "bytes": byte_level(), "bytes, NFC": byte_level(normalizers.NFC()), "bytes, NFKC": byte_level(normalizers.NFKC()),
    "stripped": byte_level(normalizers.Strip()), "control characters lost": byte_level(lost="ĒĔ"),
    "byte fallback": byte_fallback(), "white space swallowed": strips_after("<|user|>"),
    "tiny": tiny.tokenizer()._backend,
}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("e \n\t\x12\x14\u00e9\u0301\u0345\u03b1\u0313\u0300\u1100\u1161\u11a8\u2003🎉") |
                    st.characters(exclude_categories=["Cs"]), max_size=60)
       | st.sampled_from(["<|user|>" + " " * 100, "\u03b1\u0313\u0300\u0345" * 30, "e" * 300, "\x14" * 300,
                          " exaggerated" * 20]))
def test_no_text_has_fewer_tokens(kind, text):
    backend = KINDS[kind]
    assert len(backend.encode(text, add_special_tokens=False).ids) >= token_bound(backend).least_tokens(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_megabyte_is_more_than_any_small_context(kind):
    assert token_bound(KINDS[kind]).least_tokens("a " * 500_000) > 5_000


@pytest.mark.parametrize("backend", [
    words(), byte_level(normalizers.StripAccents()), byte_level(normalizers.Replace("ee", "e"))])
def test_tokenizers_that_make_nothing_of_much_have_some_slack(backend):
    assert token_bound(backend).chars_per_token == 16 * max(map(len, backend.get_vocab()))


def test_a_value_is_counted_with_everything_in_it():
    assert num_chars({"role": "user", "content": ["ab", None, {"n": 1}]}, 1000) == 2 + 4 + 4 + 7 + 3 + 2 + 1 + 1
    assert num_chars([[]] * 10_000, 100) > 100
