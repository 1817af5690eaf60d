"""Detokenisation: what is streamed adds up to the decode of all ids, and no delta holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.detokenizer import Detokenizer, TokenTexts
from jaxserve.engine.stop_strings import StopStrings


def deltas(tokenizer, ids, stop: tuple[str, ...] = (), **options) -> list[str]:
    """One delta an id, and the rest at the end."""
    stops = StopStrings(stop) if stop else None
    detokenizer = Detokenizer(TokenTexts(tokenizer), stops=stops, **options)
    parts = []
    for token_id in ids:
        update = detokenizer.update([token_id])
        parts.append(update.text)
        if update.stop is not None:
            break
    return [*parts, detokenizer.finish()]


def text_of(tokenizer, ids, **options) -> str:
    return "".join(deltas(tokenizer, ids, **options))


def split_bytes(tokenizer, text: str, choose) -> list[int]:
    """Ids whose bytes spell `text`, with entries of several bytes where `choose` says so."""
    data, ids = text.encode(), []
    while data:
        options = [i for i, entry in enumerate(tokenizer.entry_bytes) if data.startswith(entry)]
        ids.append(options[choose(len(options))])
        data = data[len(tokenizer.entry_bytes[ids[-1]]):]
    return ids


# --- What the text is -------------------------------------------------------------------------------------------

@given(st.data())
def test_any_byte_level_ids_stream_to_the_decode_of_all(byte_tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size - 1), max_size=30))
    assert text_of(byte_tokenizer, ids) == byte_tokenizer.backend.decode(ids)


@given(st.data())
def test_broken_characters_of_every_kind_stream_to_the_decode_of_all(byte_tokenizer, data):
    interesting = [0x41, 0x80, 0xBF, 0xC3, 0xE0, 0xA0, 0xED, 0xF0, 0x9F, 0xF4, 0x90, 0xFF]
    ids = data.draw(st.lists(st.sampled_from(interesting), max_size=12))
    assert text_of(byte_tokenizer, ids) == byte_tokenizer.backend.decode(ids)


@given(st.data())
def test_any_text_in_any_tokens_comes_back_in_whole_characters(byte_tokenizer, data):
    text = data.draw(st.text(max_size=20))
    ids = split_bytes(byte_tokenizer, text, lambda n: data.draw(st.integers(0, n - 1)))
    parts = deltas(byte_tokenizer, ids)
    assert "".join(parts) == text
    for count in range(len(ids)):
        # Nothing is late: all whole characters of the bytes so far are out.
        bytes_so_far = b"".join(byte_tokenizer.entry_bytes[i] for i in ids[:count])
        assert "".join(parts[:count]) == bytes_so_far.decode(errors="ignore")


@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=("Cs",)), max_size=20))
def test_sentencepiece_text_comes_back_behind_a_prompt(sp_tokenizer, text):
    ids = sp_tokenizer.encode(" " + text, add_special_tokens=False)
    whole = text_of(sp_tokenizer, ids)
    assert whole.removeprefix(" ") == sp_tokenizer.backend.decode(ids).removeprefix(" ")
    assert whole.lstrip(" ") == text.lstrip(" ")


def test_an_unfinished_byte_token_does_not_spoil_those_before_it(sp_tokenizer):
    newline, first = sp_tokenizer.token_to_id("<0x0A>"), sp_tokenizer.token_to_id("<0xF0>")
    assert text_of(sp_tokenizer, [newline, first]) == "\n\ufffd"
    assert text_of(sp_tokenizer, [first, sp_tokenizer.token_to_id("<0x41>")]) == "\ufffdA"


def test_hangul_and_emoji_stream_without_replacement_characters(make_byte_level):
    tokenizer = make_byte_level()
    ids = tokenizer.encode("a삼겹살🎉z", add_special_tokens=False)
    parts = deltas(tokenizer, ids)
    assert [part for part in parts if part] == list("a삼겹살🎉z")


@pytest.mark.parametrize(("count", "text"), [(0, ""), (1, "\ufffd"), (2, "\ufffd"), (3, "\ufffd"), (4, "🎉")])
def test_an_unfinished_character_is_one_replacement_character_at_the_end(make_byte_level, count, text):
    tokenizer = make_byte_level()
    ids = tokenizer.encode("🎉", add_special_tokens=False)[:count]
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == text == tokenizer.backend.decode(ids)
    assert parts[:-1] == [""] * (count - 1) + ["🎉"] if count == 4 else not any(parts[:-1])


def test_a_replacement_character_of_the_vocabulary_is_text(byte_tokenizer):
    token_id = byte_tokenizer.entry_bytes.index("\ufffd".encode())
    assert deltas(byte_tokenizer, [token_id]) == ["\ufffd", ""]


def test_ids_beyond_the_tokenizer_add_nothing(byte_tokenizer):
    assert text_of(byte_tokenizer, [104, byte_tokenizer.vocab_size + 5, 105]) == "hi"


def test_added_tokens_beyond_the_vocabulary_are_text(make_byte_level):
    tokenizer = make_byte_level()
    tokenizer.backend.add_tokens(["<think>", "</思考>"])
    ids = tokenizer.backend.encode("a<think></思考>", add_special_tokens=False).ids
    assert max(ids) == tokenizer.vocab_size + 1
    assert text_of(tokenizer, ids) == "a<think></思考>"


# --- Special tokens ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("skip", "spaces", "text"), [
    (True, True, "ab"), (False, True, "a</s> <s>b<s>"), (False, False, "a</s><s>b<s>")])
def test_special_tokens_are_left_out_or_shown(make_byte_level, skip, spaces, text):
    tokenizer = make_byte_level()
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    ids = [97, eos, bos, 98, bos]
    options = dict(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert text_of(tokenizer, ids, **options) == text == tokenizer.decode(ids, **options)


def test_skipped_special_tokens_do_not_break_a_character(make_byte_level):
    tokenizer = make_byte_level()
    first, second = "é".encode()
    ids = [first, tokenizer.token_to_id("<s>"), second]
    assert text_of(tokenizer, ids) == "é"
    assert text_of(tokenizer, ids, skip_special_tokens=False) == "\ufffd<s>\ufffd"


# --- Stop strings -----------------------------------------------------------------------------------------------

@given(st.data())
def test_stop_strings_cut_the_same_whatever_the_tokens(byte_tokenizer, data):
    text = data.draw(st.text("aé€🎉 hello", max_size=20))
    stops = tuple(data.draw(st.lists(st.text("aé€🎉 lo", min_size=1, max_size=4), min_size=1, max_size=3)))
    ids = split_bytes(byte_tokenizer, text, lambda n: data.draw(st.integers(0, n - 1)))
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not found else text[: sum(min(found))]
    assert text_of(byte_tokenizer, ids, stop=stops) == expected


@pytest.mark.parametrize("step", [1, 2, 3, 10])
def test_ids_behind_the_stop_string_do_not_count(make_byte_level, step):
    tokenizer = make_byte_level()
    detokenizer = Detokenizer(TokenTexts(tokenizer), stops=StopStrings(["DEF"]))
    ids, counted, text = tokenizer.encode("ABCDEFGHIJ", add_special_tokens=False), 0, ""
    for start in range(0, len(ids), step):
        update = detokenizer.update(ids[start:start + step])
        counted, text = counted + update.num_ids, text + update.text
        if update.stop is not None:
            break
    assert (counted, text, update.stop, detokenizer.finish()) == (6, "ABC", "DEF", "")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "x"), (2, "x"), (3, "xAB"), (4, "xAB"), (5, "xABAB!")])
def test_stop_strings_do_not_count_before_min_tokens(make_byte_level, min_tokens, text):
    tokenizer = make_byte_level()
    assert text_of(tokenizer, list(b"xABAB!"), stop=("AB",), min_tokens=min_tokens) == text


def test_a_stop_string_inside_a_token_cuts_there(byte_tokenizer):
    ids = [*byte_tokenizer.encode("alpha", add_special_tokens=False), 263]
    assert byte_tokenizer.backend.decode([263]) == ", beta gamma delta"
    assert text_of(byte_tokenizer, ids, stop=("gamma",)) == "alpha, beta "
    assert text_of(byte_tokenizer, ids, stop=("gamma",), include_stop=True) == "alpha, beta gamma"


def test_a_prompt_plays_no_part(make_byte_level):
    # It ends in "ST" or in half a character; the detokeniser never sees it.
    tokenizer = make_byte_level()
    assert text_of(tokenizer, tokenizer.encode("OP!", add_special_tokens=False), stop=("STOP",)) == "OP!"
    assert text_of(tokenizer, [*"é".encode()[1:], 97]) == "\ufffda"


def test_half_a_stop_string_and_half_a_character_come_out_at_the_end(make_byte_level):
    tokenizer = make_byte_level()
    ids = [*b"abST", *"é".encode()[:1]]
    assert deltas(tokenizer, ids, stop=("STOP",)) == ["a", "b", "", "", "", "ST\ufffd"]


# --- Cost -------------------------------------------------------------------------------------------------------

def test_each_id_is_decoded_once_however_long_the_sequence(byte_tokenizer):
    class Counting:
        def __init__(self):
            self.decoded = 0

        def __getattr__(self, name):
            return getattr(byte_tokenizer, name)

        def decode(self, ids, **options):
            self.decoded += len(ids)
            return byte_tokenizer.decode(ids, **options)

    tokenizer = Counting()
    texts = TokenTexts(tokenizer)
    for _ in range(3):
        detokenizer = Detokenizer(texts)
        detokenizer.update([97, 98, 99] * 1000)
    assert tokenizer.decoded <= 8
