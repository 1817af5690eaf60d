from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ResolvedConfig
from jaxserve.runtime.buckets import Bucket, choose_bucket, make_buckets, prefill_capacity


def config(max_num_seqs: int = 32, max_num_batched_tokens: int = 512, query_block: int = 32, decode_steps: int = 1,
           deterministic: bool = False) -> ResolvedConfig:
    return ResolvedConfig(
        max_model_len=4096, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_requests=10, page_size=16, num_pages=100, enable_prefix_caching=True, scheduling_policy="fcfs",
        decode_steps=decode_steps, deterministic=deterministic, max_logprobs=20, query_block=query_block,
        vocab_size=1000)


configs = st.builds(config, max_num_seqs=st.integers(1, 600), max_num_batched_tokens=st.integers(32, 9000),
                    query_block=st.sampled_from([8, 32]), deterministic=st.booleans())


@given(config=configs, min_decode_rows=st.sampled_from([1, 2]), data=st.data())
def test_every_step_that_may_be_scheduled_fits(config, min_decode_rows, data):
    buckets = make_buckets(config, min_decode_rows)
    decodes = data.draw(st.integers(0, config.max_num_seqs))
    prefill = data.draw(st.integers(0, prefill_capacity(config) // config.query_block)) * config.query_block
    # A deterministic engine launches the two kinds one after the other.
    for step in [(decodes, 0), (0, prefill)] if config.deterministic else [(decodes, prefill)]:
        if not any(step):
            continue
        bucket = choose_bucket(buckets, *step)
        assert bucket in buckets
        assert bucket.decode_rows >= step[0] and bucket.prefill_rows >= step[1]
        assert bucket.num_chunks(config.query_block) * config.query_block == bucket.prefill_rows
        # No other would have done with fewer rows.
        for other in buckets:
            if other.decode_rows >= step[0] and other.prefill_rows >= step[1]:
                assert other.num_tokens >= bucket.num_tokens


@given(config=configs, min_decode_rows=st.sampled_from([1, 2]))
def test_there_are_few(config, min_decode_rows):
    buckets = make_buckets(config, min_decode_rows)
    assert len(buckets) == 2 if config.deterministic else len(buckets) <= 11
    assert list(buckets) == sorted(set(buckets))
    assert all(bucket.decode_rows >= min_decode_rows or bucket.prefill_rows for bucket in buckets)


def test_the_default_ladder_on_cpus():
    assert make_buckets(config()) == (
        Bucket(0, 32), Bucket(0, 128), Bucket(0, 512), Bucket(1, 0), Bucket(4, 0), Bucket(8, 0), Bucket(16, 0),
        Bucket(32, 0), Bucket(32, 32), Bucket(32, 128), Bucket(32, 512))


def test_deterministic_has_one_shape_of_each_kind():
    buckets = make_buckets(config(deterministic=True))
    assert buckets == (Bucket(0, 512), Bucket(32, 0))
    assert {choose_bucket(buckets, n, 0) for n in range(1, 33)} == {Bucket(32, 0)}
    assert {choose_bucket(buckets, 0, n) for n in range(32, 513, 32)} == {Bucket(0, 512)}


def test_only_steps_without_prefill_repeat():
    for bucket in make_buckets(config(decode_steps=4)):
        assert bucket.decode_steps == (1 if bucket.prefill_rows else 4)
    assert str(Bucket(8, 0, 4)) == "decode8x4+prefill0"


@pytest.mark.parametrize("decodes, prefill, wanted", [
    (1, 0, Bucket(1, 0)), (2, 0, Bucket(4, 0)), (5, 0, Bucket(8, 0)), (17, 0, Bucket(32, 0)),
    (0, 32, Bucket(0, 32)), (0, 64, Bucket(0, 128)), (0, 160, Bucket(0, 512)),
    (1, 32, Bucket(32, 32)), (32, 512, Bucket(32, 512))])
def test_a_step_is_padded_to_the_next_shape(decodes, prefill, wanted):
    assert choose_bucket(make_buckets(config()), decodes, prefill) == wanted


def test_a_lone_row_is_paired_where_one_row_is_slow():
    """Also in an engine for one sequence at a time."""
    buckets = make_buckets(config(max_num_seqs=1), min_decode_rows=2)
    assert choose_bucket(buckets, 1, 0) == Bucket(2, 0)


def test_a_budget_that_is_no_multiple_of_a_query_block():
    assert prefill_capacity(config(max_num_batched_tokens=100)) == 96
    assert max(b.prefill_rows for b in make_buckets(config(max_num_batched_tokens=100))) == 96


def test_names_are_unique():
    names = [str(b) for b in itertools.chain(make_buckets(config()), make_buckets(config(decode_steps=2)))]
    assert len(set(names)) == len(names) - 6  # the shapes with prefill are the same in both
