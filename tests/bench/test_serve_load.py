"""The load is what was asked for, the same for the same seed."""

import itertools
import json
import statistics

import pytest

from jaxserve.bench.serve_load import LengthRange, Synthetic, Turn, continued, poisson_arrivals, read_dataset
from jaxserve.errors import ConfigError


def test_lengths_and_ids():
    load = Synthetic(input_tokens=LengthRange(3, 9), output_tokens=LengthRange(2, 4), vocab_size=100)
    turns = [turn for turn, in load.conversations(200, seed=1)]
    assert {len(turn.prompt) for turn in turns} == set(range(3, 10))
    assert {turn.max_tokens for turn in turns} == {2, 3, 4}
    assert all(0 <= token_id < 100 for turn in turns for token_id in turn.prompt)
    assert len({tuple(turn.prompt) for turn in turns}) > 195


def test_a_seed_repeats_the_load():
    load = Synthetic(kind="messages", turns=3)
    assert load.conversations(5, seed=1) == load.conversations(5, seed=1) != load.conversations(5, seed=2)


def test_prefixes_are_shared_in_turn():
    load = Synthetic(input_tokens=LengthRange(4, 4), shared_prefix=20, prefixes=2, turns=2)
    conversations = load.conversations(6, seed=1)
    starts = [tuple(first.prompt[:20]) for first, _ in conversations]
    assert starts[0::2] == [starts[0]] * 3 and starts[1::2] == [starts[1]] * 3 and starts[0] != starts[1]
    assert all(len(first.prompt) == 24 and len(second.prompt) == 4 for first, second in conversations)


@pytest.mark.parametrize(("kind", "prompt"), [("text", str), ("messages", list)])
def test_words(kind, prompt):
    (turn,), = Synthetic(kind=kind, input_tokens=LengthRange(5, 5)).conversations(1, seed=0)
    assert isinstance(turn.prompt, prompt)
    text = turn.prompt if kind == "text" else turn.prompt[0]["content"]
    assert len(text.split()) == 5


def test_a_turn_goes_on_from_what_was_said():
    assert continued(None, "", None, Turn([1], 1)) == [1]
    assert continued([1, 2], "x", [3], Turn([4], 1)) == [1, 2, 3, 4]
    assert continued("a b", " c", None, Turn("d", 1)) == "a b c d"
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert continued([question], "b", None, Turn([question], 1)) == [question, answer, question]
    with pytest.raises(ConfigError, match="--api chat"):
        continued([1], "x", None, Turn([2], 1))


def test_arrivals_are_poisson():
    times = list(itertools.islice(poisson_arrivals(8.0, seed=3), 4000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # as exponential ones have
    assert times == list(itertools.islice(poisson_arrivals(8.0, seed=3), 4000)) == sorted(times)


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("32-512", 32, 512), ("5-5", 5, 5)])
def test_ranges(text, low, high):
    assert LengthRange.parse(text) == LengthRange(low, high)


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "a", "1.5", "3-", "1-9999999999"])
def test_wrong_ranges(text):
    with pytest.raises(ValueError, match="range such as"):
        LengthRange.parse(text)


def test_datasets(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join([json.dumps({"prompt": "Hello", "max_tokens": 3}), "", json.dumps({"prompt": "Bye"})]))
    length = LengthRange(7, 7)
    assert read_dataset(file, "text", length, 0) == [[Turn("Hello", 3)], [Turn("Bye", 7)]]
    assert read_dataset(file, "messages", length, 0)[0][0].prompt == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"messages": []}', '{"prompt": "a", "max_tokens": "x"}',
                                  '{"prompt": "a", "max_tokens": 1e999}', pytest.param("[" * 100_000, id="deep")])
def test_wrong_datasets(tmp_path, text):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n' + text)
    with pytest.raises(ConfigError, match="line 2"):
        read_dataset(file, "text", LengthRange(1, 1), 0)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_dataset(file, "text", LengthRange(1, 1), 0)
    file.write_bytes(b'{"prompt": "\xfc"}')
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_dataset(file, "text", LengthRange(1, 1), 0)


def test_a_text_may_hold_any_end_of_line_but_json_s(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8", newline="")
    assert read_dataset(tmp_path / "data.jsonl", "text", LengthRange(1, 1), 0) == [[Turn("a\u2028b", 1)]]
