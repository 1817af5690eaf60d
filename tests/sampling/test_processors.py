"""Masks, biases and penalties, each alone and all together, against a float64 reference."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.engine.request import SequenceOptions
from jaxserve.engine.results import Fault
from jaxserve.sampling import processors
from jaxserve.sampling.slots import admit, init_slots, pack_slot, slot_options
from tests.sampling.harness import (
    VALID,
    VOCAB,
    Request,
    make_slots,
    options,
    processed,
    random_logits,
    sample_requests,
)

BATCH = 16


@jax.jit
def _process(logits, slot_ids, positions, slots):
    logits = processors.mask_padding(logits, VALID)
    active = np.ones(len(logits), bool)
    return processors.process(logits, slot_ids, positions, active, slots, slot_options(slots, slot_ids))


def process(logits, requests: list[Request]) -> np.ndarray:
    """f32[R, VOCAB]; padded to one shape with requests that want nothing."""
    padded = [*requests, *[Request(options())] * (BATCH - len(requests))]
    logits = np.concatenate([logits, random_logits(99, BATCH - len(requests))])
    positions = np.array([r.position for r in padded], np.int32)
    return np.asarray(_process(logits, np.arange(BATCH), positions, make_slots(padded)))[:len(requests)]


HISTORY = {"prompt": [4, 5, 5, 6], "output": [7, 7, 7, 8, 4]}
ALONE = {
    "nothing": {},
    "allowed": {"allowed_token_ids": (3, 31, 32, 64, 196)},
    "min_tokens": {"min_tokens": 6, "eos_ids": frozenset({0, 9}), "stop_ids": frozenset({7, 11})},
    "min_tokens reached": {"min_tokens": 5, "eos_ids": frozenset({0, 9})},
    "bad words": {"bad_words": ((20,), (8, 4, 21), (7, 4, 22), (9, 23))},
    "bias": {"logit_bias": ((1, 5.0), (7, -100.0), (50, 0.25))},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
}
ALL = {
    "allowed_token_ids": tuple(range(0, 196, 3)), "min_tokens": 6, "eos_ids": frozenset({0, 9}),
    "stop_ids": frozenset({6}), "bad_words": ((8, 4, 21), (27,)), "logit_bias": ((3, 5.0), (6, 9.0), (8, -4.0)),
    "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
}


@pytest.mark.parametrize("fields", [*ALONE.values(), ALL], ids=[*ALONE, "all"])
def test_each_option_does_what_its_definition_says(fields):
    logits, request = random_logits(1), Request(options(**fields), **HISTORY)
    np.testing.assert_allclose(process(logits, [request])[0], processed(logits[0], request), rtol=2e-6, atol=1e-6)


def test_rows_do_not_see_each_others_options():
    requests = [Request(options(**fields), **HISTORY) for fields in [*ALONE.values(), ALL]]
    logits = random_logits(2, len(requests))
    together = process(logits, requests)
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(together[row], process(logits[row:row + 1], [request])[0])


def test_a_row_without_options_keeps_its_logits():
    logits = random_logits(3, 2)
    logits[0, :3] = 0.0, -0.0, -np.inf
    plain, _ = process(logits, [Request(options(), **HISTORY), Request(options(**ALL), **HISTORY)])
    np.testing.assert_array_equal(plain[:VALID], logits[0, :VALID])


def test_bias_comes_before_penalties_and_masks_win_over_bias():
    logits = np.full((1, VOCAB), -1.0, np.float32)
    request = Request(options(logit_bias=((5, 3.0), (6, 100.0)), repetition_penalty=2.0, bad_words=((6,),)), [5])
    out = process(logits, [request])[0]
    assert out[5] == (-1 + 3) / 2  # divided, since the bias made it positive; -1 * 2 + 3 would be 1 too many
    assert out[6] == -np.inf


def test_presence_and_frequency_count_the_output_only():
    request = Request(options(frequency_penalty=2.0), prompt=[9] * 20)
    logits = np.zeros((1, VOCAB), np.float32)
    assert process(logits, [request])[0, 9] == 0.0
    again = Request(request.options, request.prompt, output=[9, 9])
    assert process(logits, [again])[0, 9] == -4.0


def test_after_preemption_penalties_count_as_before():
    # The same ids arrive in two ways: sampled one by one, or uploaded again as known tokens.
    request = Request(options(frequency_penalty=1.0, repetition_penalty=1.2), [1, 2], [3, 3])
    slots = make_slots([Request(request.options, request.prompt)] * BATCH)
    slots = slots.replace(tokens=slots.tokens.at[0, 2:4].set(3))
    logits = random_logits(4, BATCH)
    grown = _process(logits, np.arange(BATCH), np.full(BATCH, 4, np.int32), slots)[0]
    np.testing.assert_array_equal(grown, process(logits[:1], [request])[0])


@pytest.mark.parametrize("history, banned", [
    ([7, 8], True), ([8], False), ([7, 8, 1], False), ([1, 7, 8], True), ([], False),
])
def test_a_bad_word_of_many_tokens_loses_its_last_one_after_its_first_ones(history, banned):
    request = Request(options(bad_words=((7, 8, 9),)), prompt=[], output=history)
    out = process(np.zeros((1, VOCAB), np.float32), [request])[0]
    assert (out[9] == -np.inf) == banned
    assert np.isfinite(out[[7, 8]]).all()


def test_bad_words_may_begin_in_the_prompt_and_be_as_long_as_the_table():
    word = tuple(range(10, 26))
    request = Request(options(bad_words=(word,)), prompt=word[:12], output=word[12:15])
    out = process(np.zeros((1, VOCAB), np.float32), [request])[0]
    assert np.flatnonzero(out[:VALID] == -np.inf).tolist() == [25]


def test_all_ends_are_masked_until_min_tokens():
    ends = {"eos_ids": frozenset({3, 5}), "stop_ids": frozenset({7}), "min_tokens": 2}
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 5, 7]] = 9.0, 8.0, 7.0
    logits[0, 11] = 1.0
    for output, expected in ([], 11), ([1], 11), ([1, 1], 3):
        assert sample_requests(logits, [Request(options(**ends), output=output)]).ids[0] == expected


def test_allowed_ids_bind_their_own_row_only():
    logits = random_logits(5, 3)
    out = sample_requests(logits, [Request(options()), Request(options(allowed_token_ids=(9,))), Request(options())])
    assert out.ids.tolist() == [logits[0, :VALID].argmax(), 9, logits[2, :VALID].argmax()]


def test_histories_longer_than_one_chunk_are_counted_whole():
    max_len = 2 * processors.HISTORY_CHUNK + 100
    ids = np.random.default_rng(6).integers(0, VALID, max_len)
    request = Request(
        SequenceOptions(max_tokens=1, repetition_penalty=1.1, frequency_penalty=0.01), ids[:700], ids[700:1100])
    ints, floats = pack_slot(request.options, 700, ids[:1100], max_len, VOCAB)
    slots = admit(init_slots(1, max_len, VOCAB), np.int32(0), ints, floats)
    logits = random_logits(6)
    out = partial(jax.jit(processors.process), processors.mask_padding(logits, VALID))(
        np.zeros(1, np.int32), np.array([1100], np.int32), np.ones(1, bool), slots,
        slot_options(slots, np.zeros(1, np.int32)))
    np.testing.assert_allclose(out[0], processed(logits[0], request), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masks_do_not_hide_a_broken_models_logits(value):
    logits = random_logits(7)
    logits[0, 100] = value
    out = sample_requests(logits, [Request(options(allowed_token_ids=(1, 2)))])
    assert out.faults.tolist() == [Fault.NOT_FINITE] and out.ids[0] == 0


