"""SamplingParams refuses every value that no model could run, and says which limit was broken."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_N, MAX_STOP_STRING_CHARS, MAX_STOP_TOKEN_IDS, SamplingParams

NAN = float("nan")

WRONG = [
    ("n", [0, -1, MAX_N + 1, 1.0, True, "1", None]),
    ("max_tokens", [0, -1, 2**31, 1.5, "5", True, NAN]),
    ("min_tokens", [-1, 1.0, None, False]),
    ("temperature", [-0.1, NAN, math.inf, 10**400, "1", True]),
    ("top_k", [-2, 2.0, True, 2**31]),
    ("top_p", [0, 0.0, -0.1, 1.0001, NAN, "1"]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("repetition_penalty", [0, -1, NAN, math.inf, 1e-9]),
    ("presence_penalty", [-2.1, 2.1, NAN, None]),
    ("frequency_penalty", [-2.1, 2.1, NAN, None]),
    ("logit_bias", [{-1: 5}, {"abc": 1}, {"7": 1}, {1: 101}, {1: -101}, {1: NAN}, {1: "x"}, {1.5: 1}, {True: 1}, [1],
                    {i: 1 for i in range(MAX_LOGIT_BIAS + 1)}]),
    ("allowed_token_ids", [[], [-1], [1.0], ["1"], "12", 5, [True], {1: 2}, [2**31]]),
    ("bad_words", ["", [""], [1], b"word", ["ok"] * 129, ["\ud800"]]),
    ("stop", ["", [""], ["", "zzz"], [1], 5, b"stop", ["a"] * 65, "x" * (MAX_STOP_STRING_CHARS + 1), ["\udfff"]]),
    ("stop_token_ids", [[-1], ["1"], "1", [None], range(MAX_STOP_TOKEN_IDS + 1)]),
    ("include_stop_str_in_output", [1, None, "yes"]),
    ("ignore_eos", [0]),
    ("seed", [1.0, True, 2**64, -(2**63) - 1, "5"]),
    ("logprobs", [-1, True, 1.0]),
    ("prompt_logprobs", [-1, True]),
    ("detokenize", [None]),
    ("skip_special_tokens", [1]),
    ("spaces_between_special_tokens", ["no"]),
    ("priority", [1.0, None, True]),
    ("cache_salt", ["", 5, "x" * 1025, "\ud800"]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG for value in values], ids=str)
def test_a_wrong_value_is_refused_under_its_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("given", "in_message"), [
    (dict(temperature=-1.5), ["-1.5", "0", "10000"]),
    (dict(top_k=-2), ["-2", "-1"]),
    (dict(stop=["x"] * 65), ["65", "64"]),
    (dict(min_tokens=5, max_tokens=4), ["5", "4", "max_tokens"]),
    (dict(logit_bias={7: 101}), ["101", "100"]),
])
def test_a_message_names_the_value_and_the_limit(given, in_message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    for part in in_message:
        assert part in str(caught.value)


def test_a_message_does_not_repeat_a_huge_value():
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature="x" * 1_000_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_an_unknown_name_is_an_error():
    with pytest.raises(TypeError, match="unknown.*temprature .did you mean temperature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    assert copy.deepcopy(pickle.loads(pickle.dumps(SamplingParams(n=2)))) == SamplingParams(n=2)


@pytest.mark.parametrize("given", [
    dict(temperature=0), dict(temperature=1e-40), dict(top_k=-1), dict(top_k=0), dict(top_k=2**31 - 1), dict(top_p=1),
    dict(min_p=1), dict(seed=-1), dict(seed=2**64 - 1), dict(logprobs=0), dict(n=MAX_N), dict(presence_penalty=-2),
    dict(logit_bias={0: -100, 5: 100}), dict(priority=-5), dict(max_tokens=0, prompt_logprobs=1),
    dict(stop="\0"), dict(stop=["x" * MAX_STOP_STRING_CHARS]),
])
def test_values_at_the_limits_are_fine(given):
    SamplingParams(**given)


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), allowed_token_ids=np.array([1, 2]))
    assert params == SamplingParams(temperature=0.5, max_tokens=3, allowed_token_ids=[1, 2])
    assert type(params.max_tokens) is int and type(params.temperature) is float


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "logit_bias"])
def test_an_empty_collection_means_none(name):
    assert not getattr(SamplingParams(**{name: {} if name == "logit_bias" else []}), name)


def test_stop_has_one_form_inside():
    assert SamplingParams(stop="END").stop_strings == SamplingParams(stop=["END"]).stop_strings == ("END",)
    assert SamplingParams().stop_strings == ()


def test_one_bad_word_needs_no_list():
    assert SamplingParams(bad_words="the") == SamplingParams(bad_words=["the"])


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="END", detokenize=False)


def test_no_tokens_are_only_asked_for_to_score_the_prompt():
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)


def test_clone_changes_and_validates():
    params = SamplingParams(temperature=0.5, stop="x")
    assert params.clone(temperature=0.0) == SamplingParams(temperature=0.0, stop="x")
    assert params.temperature == 0.5
    with pytest.raises(RequestError):
        params.clone(top_p=2)
    with pytest.raises(TypeError):
        params.clone(nonsense=1)
