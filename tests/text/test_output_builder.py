"""A request's events add up to its output, in text, ids and logprobs, however it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.detokenizer import TokenTexts
from jaxserve.engine.output_builder import LogprobRow, RequestState
from jaxserve.engine.processor import Processor
from jaxserve.errors import EngineError
from jaxserve.outputs import Logprob
from jaxserve.sampling_params import SamplingParams

EOS, OTHER_EOS = 257, 300


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def start(make_byte_level, make_config):
    """Starts a request: a byte is an id, 257 (`</s>`) and 300 are EOS, max_model_len is 64."""
    tokenizer = make_byte_level()
    texts = TokenTexts(tokenizer)
    eos_ids = frozenset({EOS, OTHER_EOS})

    def make(prompt="prompt", clock=None, tokenizer=tokenizer, texts=texts, **params) -> RequestState:
        processed = Processor(tokenizer, make_config(), eos_ids, {}, 0).process(prompt, SamplingParams(**params))
        return RequestState("id", processed, texts, clock or Clock())

    return make


def feed(state: RequestState, ids, step: int = 1, index: int = 0, rows=None) -> list:
    """Appends until the completion ends; returns the events."""
    ids = list(ids)
    events = []
    for i in range(0, len(ids), step):
        event = state.append(index, ids[i:i + step], rows and rows[i:i + step])
        if event is None:
            break
        events.append(event)
    return events


def summary(state: RequestState, index: int = 0) -> tuple:
    completion = state.output().outputs[index]
    return completion.text, completion.finish_reason, completion.stop_reason, len(completion.token_ids)


# --- How a completion ends --------------------------------------------------------------------------------------

def test_length_ends_a_completion(start):
    state = start(max_tokens=3)
    events = feed(state, b"abcdef")
    assert summary(state) == ("abc", "length", None, 3)
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_half_a_character_at_the_length_limit_is_shown_alike_in_both_modes(start):
    state = start(max_tokens=2)
    events = feed(state, "🎉".encode())
    assert "".join(event.text for event in events) == state.output().text == "\ufffd"
    assert summary(state)[1:] == ("length", None, 2)


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_each_eos_ends_and_stays_among_the_ids_but_not_in_the_text(start, eos, step):
    state = start(skip_special_tokens=False)
    feed(state, [*b"ab", eos, *b"cd"], step)
    assert summary(state) == ("ab", "stop", None, 3)
    assert state.output().outputs[0].token_ids == [*b"ab", eos]


def test_ignored_eos_does_not_end(start):
    state = start(ignore_eos=True, max_tokens=3)
    feed(state, [97, EOS, 98])
    assert summary(state) == ("ab", "length", None, 3)


def test_a_stop_id_ends_and_is_named(start):
    state = start(stop_token_ids=[ord("c")])
    feed(state, b"abcd")
    assert summary(state) == ("ab", "stop", ord("c"), 3)


def test_the_text_of_the_ending_id_is_kept_on_request(start):
    state = start(stop_token_ids=[ord("c")], include_stop_str_in_output=True)
    feed(state, b"abcd")
    assert summary(state)[0] == "abc"
    for skip, text in ((True, "ab"), (False, "ab</s>")):
        state = start(include_stop_str_in_output=True, skip_special_tokens=skip)
        feed(state, [*b"ab", EOS])
        assert summary(state)[0] == text


@pytest.mark.parametrize("step", [1, 3, 4, 16])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_and_never_leaks(start, step, include):
    state = start(stop=["DEFGHIJ"], include_stop_str_in_output=include)
    events = feed(state, b"ABCDEFGHIJKLM", step)
    text = "ABCDEFGHIJ" if include else "ABC"
    assert summary(state) == (text, "stop", "DEFGHIJ", 10)
    assert "".join(event.text for event in events) == text
    if not include:
        assert not any("D" in event.text for event in events)


def test_a_stop_string_before_eos_wins_and_one_after_it_is_not_seen(start):
    state = start(stop=["b"])
    feed(state, [*b"ab", EOS], step=3)
    assert summary(state) == ("a", "stop", "b", 2)
    state = start(stop=["b"])
    feed(state, [97, EOS, 98], step=3)
    assert summary(state) == ("a", "stop", None, 2)


def test_a_stop_string_in_the_last_token_allowed_is_a_stop(start):
    state = start(stop=["c"], max_tokens=3)
    feed(state, b"abc")
    assert summary(state) == ("ab", "stop", "c", 3)


def test_only_generated_text_is_matched(start):
    state = start(prompt="say STOP ST", stop=["STOP"], max_tokens=4)
    feed(state, b"OP!!")
    assert summary(state) == ("OP!!", "length", None, 4)


@pytest.mark.parametrize("reason", ["abort", "error", "length"])
def test_what_is_held_back_comes_out_in_any_way_of_ending(start, reason):
    state = start(stop=["STOP"])
    events = feed(state, [*b"abST", 0xF0])
    assert "".join(event.text for event in events) == "ab"
    last = state.finish(0, reason)
    assert (last.text, last.finish_reason) == ("ST\ufffd", reason)
    assert summary(state) == ("abST\ufffd", reason, None, 5)


def test_nothing_follows_the_end(start):
    state = start(max_tokens=1)
    assert state.append(0, [97]).output is not None
    assert state.append(0, [98]) is None
    assert state.finish(0, "abort") is None
    assert state.abort() == [] and state.fail(EngineError("late")) == []
    assert state.output().error is None
    assert summary(state) == ("a", "length", None, 1)


def test_a_step_without_ids_is_no_event(start):
    assert start().append(0, []) is None


def test_scoring_generates_nothing(start):
    state = start(max_tokens=0, prompt_logprobs=0)
    event = state.append(0, [97])
    assert (event.text, event.token_ids, event.finish_reason) == ("", [], "length")
    assert summary(state) == ("", "length", None, 0)


def test_ids_without_text(start):
    for state in (start(detokenize=False, max_tokens=3, logprobs=1),
                  start(prompt=[1], tokenizer=None, texts=None, max_tokens=3, logprobs=1)):
        feed(state, b"abc", rows=[LogprobRow(-1.0, 1, [97], [-1.0])] * 3)
        assert summary(state) == ("", "length", None, 3)
        assert state.output().outputs[0].logprobs[0][97].decoded is None


# --- Events and output ------------------------------------------------------------------------------------------

@given(st.data())
def test_events_add_up_to_the_output(start, data):
    ids = data.draw(st.lists(st.one_of(st.integers(0, 259), st.sampled_from(list("añ🎉".encode()))), max_size=30))
    stop = data.draw(st.lists(st.text("añ🎉", min_size=1, max_size=3), max_size=2))
    options = dict(stop=stop, max_tokens=30, logprobs=1, include_stop_str_in_output=data.draw(st.booleans()),
                   skip_special_tokens=data.draw(st.booleans()))
    rows = [LogprobRow(-float(i), 2, [1], [-0.5]) for i in range(len(ids))]
    outputs = []
    for step in (1, data.draw(st.integers(2, 8)), 30):
        state = start(**options)
        events = feed(state, ids, step, rows=rows)
        if not state.finished:
            events.append(state.finish(0, "abort"))
        completion = state.output().outputs[0]
        assert completion.text == "".join(event.text for event in events)
        assert completion.token_ids == [i for event in events for i in event.token_ids]
        assert completion.logprobs == [entry for event in events for entry in event.logprobs]
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [completion.finish_reason]
        assert [event.output for event in events] == [None] * (len(events) - 1) + [state.output()]
        outputs.append(completion)
    assert outputs[0] == outputs[1] == outputs[2]


def test_completions_stream_and_end_on_their_own(start):
    state = start(n=3, stop=["STOP"])
    state.append(0, list(b"abS"))
    state.append(2, list(b"xSTOP"))
    first_end = state.append(1, [EOS])
    assert (first_end.index, first_end.finish_reason, first_end.output) == (1, "stop", None)
    assert not state.finished
    last = state.append(0, list(b"TOP"))
    assert state.finished and last.output is not None
    assert [(c.index, c.text, c.stop_reason) for c in last.output.outputs] == [
        (0, "ab", "STOP"), (1, "", None), (2, "x", "STOP")]
    assert last.output.finished and last.output.prompt == "prompt"


def test_abort_and_failure_end_what_still_runs(start):
    state = start(n=3, max_tokens=2)
    state.append(1, list(b"ab"))
    state.append(0, list(b"a"))
    events = state.abort()
    assert [(e.index, e.finish_reason) for e in events] == [(0, "abort"), (2, "abort")]
    assert [e.output is not None for e in events] == [False, True]

    error = EngineError("the device is gone")
    state = start(n=2)
    state.append(0, list(b"a"))
    events = state.fail(error)
    assert [(e.index, e.finish_reason) for e in events] == [(0, "error"), (1, "error")]
    assert events[-1].output.error is error and events[-1].output.outputs[0].text == "a"


def test_an_output_does_not_change_any_more(start):
    state = start()
    state.append(0, [97])
    before = state.output()
    state.append(0, [98])
    assert (before.text, before.outputs[0].token_ids) == ("a", [97])


# --- Logprobs ---------------------------------------------------------------------------------------------------

def test_logprobs_hold_the_best_and_the_sampled(start):
    state = start(logprobs=2, max_tokens=2)
    rows = [
        LogprobRow(-0.5, 1, [97, 98, 99], [-0.5, -1.0, -2.0]),
        LogprobRow(-9.0, 40, [98, 0xF0, 99], [-0.25, -1.5, -2.0])]
    event = state.append(0, list(b"az"), rows)
    assert event.logprobs == [
        {97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 2, "b")},
        {98: Logprob(-0.25, 1, "b"), 0xF0: Logprob(-1.5, 2, "\ufffd"), 122: Logprob(-9.0, 40, "z")}]
    assert [list(position) for position in event.logprobs] == [[97, 98], [98, 0xF0, 122]]
    completion = event.output.outputs[0]
    assert completion.logprobs == event.logprobs and completion.cumulative_logprob == -9.5


def test_zero_logprobs_is_the_sampled_one_alone(start):
    event = start(logprobs=0).append(0, [97], [LogprobRow(-3.0, 5, [98], [-0.1])])
    assert event.logprobs == [{97: Logprob(-3.0, 5, "a")}]


def test_a_tie_at_the_end_of_the_list_is_ranked_behind_it(start):
    event = start(logprobs=1).append(0, [97], [LogprobRow(-1.0, 1, [98], [-1.0])])
    assert event.logprobs == [{98: Logprob(-1.0, 1, "b"), 97: Logprob(-1.0, 2, "a")}]


def test_logprobs_of_dropped_ids_do_not_count(start):
    state = start(logprobs=0, stop=["b"])
    state.append(0, list(b"abc"), [LogprobRow(-1.0, 1, [], [])] * 3)
    completion = state.output().outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) == 2
    assert completion.cumulative_logprob == -2.0


def test_without_logprobs_there_are_none(start):
    state = start(max_tokens=1)
    event = state.append(0, [97])
    assert event.logprobs is None
    completion = event.output.outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert event.output.prompt_logprobs is None


def test_prompt_logprobs_come_in_chunks_and_the_first_position_has_none(start):
    state = start(prompt="abc", prompt_logprobs=1, max_tokens=1)
    assert state.output().prompt_logprobs == [None, None, None]
    state.add_prompt_logprobs(1, [LogprobRow(-2.0, 3, [120], [-0.5])])
    again = [LogprobRow(-7.0, 3, [120], [-0.5]), LogprobRow(-1.0, 1, [99], [-1.0])]
    state.add_prompt_logprobs(1, again)
    output = state.append(0, [97]).output
    assert output.prompt_logprobs == [
        None, {120: Logprob(-0.5, 1, "x"), 98: Logprob(-2.0, 3, "b")}, {99: Logprob(-1.0, 1, "c")}]


# --- Timings ----------------------------------------------------------------------------------------------------

def test_timings_and_cached_tokens_are_those_of_the_first_time(start):
    clock = Clock()
    state = start(clock=clock, max_tokens=2, n=2)
    clock.now += 1
    state.mark_scheduled(16)
    clock.now += 2
    state.append(0, [97])
    clock.now += 4
    state.mark_scheduled(32)
    state.append(0, [98])
    state.append(1, [97])
    clock.now += 8
    output = state.append(1, [98]).output
    timings = output.timings
    assert (timings.queue, timings.first_token, timings.total) == (1, 3, 15)
    assert output.num_cached_tokens == 16
