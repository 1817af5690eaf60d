"""What a load run's numbers mean, from recorded times."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.serve_metrics import Chunk, Distribution, Exchange, measure, meets, parse_slos


def exchange(*chunks, scheduled=0.0, **fields) -> Exchange:
    return Exchange(scheduled, chunks=[Chunk(*chunk) for chunk in chunks], **fields)


def test_one_request_by_hand():
    one = exchange((10.5, 1), (10.7, 2), (11.0, 1), scheduled=10.0, sent=10.1)
    assert one.ttft == pytest.approx(0.5) and one.e2e == pytest.approx(1.0)
    assert one.tpot == pytest.approx(0.5 / 3)  # four tokens, and the first is not in it
    assert one.gaps() == [(pytest.approx(0.1), 2), (pytest.approx(0.3), 1)]
    run = measure([one])
    assert (run.duration, run.output_tokens) == (pytest.approx(1.0), 4)
    assert run.ttft.percentiles == {50: pytest.approx(0.5), 90: pytest.approx(0.5), 95: pytest.approx(0.5),
                                    99: pytest.approx(0.5)}
    assert run.send_lag.mean == pytest.approx(0.1)


def test_latency_counts_from_the_scheduled_moment():
    """No coordinated omission: a client that could not send in time does not hide it."""
    late = exchange((12.0, 1), scheduled=10.0, sent=11.9)
    assert late.ttft == pytest.approx(2.0)


def test_one_token_has_no_time_per_output_token():
    one = exchange((0.5, 1))
    assert one.tpot is None and measure([one]).tpot is None and measure([one]).itl is None
    assert meets(one, {"tpot": 1e-9})


def test_a_chunk_of_several_tokens_is_as_many_gaps():
    """A server that sends pairs is not slower than one that sends each token, nor faster."""
    single = exchange(*((0.1 * i, 1) for i in range(1, 8)))
    pairs = exchange((0.1, 1), *((0.1 * i, 2) for i in (3, 5, 7)))
    assert measure([single]).itl.mean == pytest.approx(measure([pairs]).itl.mean)
    assert measure([single]).itl.weight == measure([pairs]).itl.weight == 6


def test_tokens_that_the_server_did_not_count():
    told = exchange((1.0, None), (2.0, None), completion_tokens=6)
    assert told.num_tokens == 6 and told.tpot == pytest.approx(1 / 5)
    untold = exchange((1.0, None), (2.0, None))
    assert untold.num_tokens == 2
    assert not measure([told]).counted and measure([exchange((1.0, 1))]).counted


def test_failures_are_counted_by_kind_and_in_no_latency():
    run = measure([exchange((1.0, 1)), exchange((9.0, 1), error="HTTP 500"), exchange(error="timeout"), exchange(),
                   exchange(error="timeout")], {"ttft": 2.0})
    assert run.errors == {"HTTP 500": 1, "timeout": 2, "no tokens": 1}
    assert (run.num_requests, run.num_done, run.num_good) == (5, 1, 1)
    assert run.output_tokens == 1 and run.ttft.max == 1.0
    assert run.duration == 9.0


def test_no_requests_and_only_failures():
    assert measure([]).requests_per_second == 0
    run = measure([exchange(error="cannot connect")], {"ttft": 1.0})
    assert (run.ttft, run.output_tokens_per_second, run.goodput) == (None, 0.0, 0.0)


def test_server_counts_are_summed_where_they_are_told():
    run = measure([exchange((1.0, 1), prompt_tokens=7, cached_tokens=4), exchange((1.0, 1))])
    assert (run.prompt_tokens, run.cached_tokens) == (7, 4)
    assert measure([exchange((1.0, 1))]).prompt_tokens is None


@pytest.mark.parametrize(("text", "slos"), [
    ("ttft=300ms", {"ttft": 0.3}), ("ttft=1.5s, tpot=50ms,e2e=10s", {"ttft": 1.5, "tpot": 0.05, "e2e": 10.0})])
def test_slos(text, slos):
    assert parse_slos(text) == pytest.approx(slos)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=300", "itl=3ms", "ttft=-3ms", "ttft=3ms;tpot=3ms"])
def test_wrong_slos(text):
    with pytest.raises(ValueError, match="ttft=300ms"):
        parse_slos(text)


# -- properties

gap = st.floats(0, 100, allow_nan=False)
answers = st.builds(
    lambda scheduled, first, rest: exchange(
        *((scheduled + first + sum(gap for gap, _ in rest[:i]), count)
          for i, count in enumerate([1, *(count for _, count in rest)])), scheduled=scheduled),
    gap, gap, st.lists(st.tuples(gap, st.integers(1, 5)), max_size=8))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(answers, min_size=1, max_size=8))
def test_the_parts_of_a_request_sum_up(exchanges):
    for one in exchanges:
        assert close(one.ttft + sum(seconds * count for seconds, count in one.gaps()), one.e2e)
        if one.tpot is not None:
            assert close(one.ttft + one.tpot * (one.num_tokens - 1), one.e2e)
            # With one token in the first chunk the two agree on the request's mean.
            assert close(one.tpot, Distribution.of(one.gaps()).mean)
    run = measure(exchanges)
    for each in (run.ttft, run.e2e, run.itl, run.tpot):
        if each is not None:
            assert list(each.percentiles.values()) == sorted(each.percentiles.values())
            assert each.percentiles[99] <= each.max


@given(st.lists(answers, min_size=1, max_size=8), st.floats(-1000, 1000))
def test_only_differences_of_times_count(exchanges, shift):
    later = [dataclasses.replace(one, scheduled=one.scheduled + shift,
                                 chunks=[Chunk(chunk.at + shift, chunk.tokens) for chunk in one.chunks])
             for one in exchanges]
    before, after = measure(exchanges), measure(later)
    assert math.isclose(before.duration, after.duration, abs_tol=1e-6)
    assert math.isclose(before.e2e.mean, after.e2e.mean, abs_tol=1e-6)


@given(st.lists(answers, min_size=1, max_size=8), st.floats(0, 50), st.floats(0, 5))
def test_goodput_is_what_meets_every_bound(exchanges, ttft, slack):
    tight, loose = measure(exchanges, {"ttft": ttft}), measure(exchanges, {"ttft": ttft + slack})
    assert tight.num_good == sum(one.ttft <= ttft for one in exchanges) <= loose.num_good
    assert measure(exchanges, {"ttft": ttft, "e2e": 0.0}).num_good <= tight.num_good
    assert measure(exchanges, {"ttft": math.inf}).num_good == len(exchanges)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 6)), min_size=1, max_size=30))
def test_a_weighted_percentile_is_that_of_the_repeated_samples(samples):
    repeated = sorted(value for value, count in samples for _ in range(count))
    found = Distribution.of((value, float(count)) for value, count in samples)
    for rank, value in found.percentiles.items():
        assert value == repeated[-(-len(repeated) * rank // 100) - 1]
    assert found.max == repeated[-1] and math.isclose(found.mean, sum(repeated) / len(repeated), abs_tol=1e-9)
