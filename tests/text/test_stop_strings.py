"""Stop strings: the first match in the text is found whatever the pieces, and no more is held than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.stop_strings import StopMatcher, StopStrings

# Few letters, so that stop strings overlap each other and themselves.
texts = st.text("abc🎉", max_size=40)
stop_lists = st.lists(st.text("abc🎉", min_size=1, max_size=5), min_size=1, max_size=5)


@st.composite
def pieces(draw) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the match completed first, and the longest of those."""
    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return None
    end, negative_length, stop = min(matches)
    return end + negative_length, stop


def read(parts: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop)
    shown = []
    for part in parts:
        text, stop = matcher.feed(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@given(pieces(), stop_lists, st.booleans())
def test_the_shown_text_ends_at_the_first_match(parts, stops, include_stop):
    text = "".join(parts)
    shown, stop = read(parts, stops, include_stop)
    match = first_match(text, stops)
    if match is None:
        assert (("".join(shown)), stop) == (text, None)
    else:
        start, expected = match
        assert stop == expected
        assert "".join(shown) == text[:start] + (expected if include_stop else "")


@given(pieces(), st.text("abc🎉", min_size=1, max_size=5))
def test_one_stop_string_cuts_where_find_says(parts, stop):
    text = "".join(parts)
    shown, hit = read(parts, [stop])
    position = text.find(stop)
    assert (hit is not None) == (position >= 0)
    assert "".join(shown) == (text[:position] if position >= 0 else text)


@given(pieces(), stop_lists)
def test_held_is_the_longest_end_that_could_still_become_a_stop_string(parts, stops):
    matcher = StopMatcher(StopStrings(stops))
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    read_so_far = shown = ""
    for part in parts:
        text, stop = matcher.feed(part)
        if stop is not None:
            return
        read_so_far, shown = read_so_far + part, shown + text
        held = max((read_so_far[i:] for i in range(len(read_so_far) + 1) if read_so_far[i:] in beginnings), key=len)
        assert shown + held == read_so_far


@pytest.mark.parametrize("parts", [[", beta gamma delta"], [", beta ga", "mma delta"], list(", beta gamma delta")])
def test_the_cut_is_exact_inside_a_piece(parts):
    assert "".join(read(parts, ["gamma"])[0]) == ", beta "


def test_of_overlapping_stop_strings_the_one_completed_first_wins():
    assert read(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert read(["xabcd"], ["bc", "abc"]) == (["x"], "abc")
    assert read(["xabcd"], ["d", "ab"]) == (["x"], "ab")


def test_a_completion_after_a_false_start_is_found():
    assert read(list("aabaabaaa"), ["aabaaa"]) == (["", "", "", "", "", "aab", "", "", ""], "aabaaa")


def test_what_cannot_become_a_stop_string_is_shown_at_once():
    assert read(["Hello\n", "Wor", "ld\n", "\n"], ["\n\n"]) == (["Hello", "\nWor", "ld", ""], "\n\n")
