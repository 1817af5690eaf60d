"""What a sequence asks for arrives in its slot, and only there."""

import jax
import numpy as np
import pytest

from jaxserve.sampling.slots import (
    MAX_END_IDS,
    Float,
    Int,
    abstract_slots,
    admit,
    init_slots,
    pack_slot,
    packed_sizes,
)
from jaxserve.sampling_params import GREEDY_TEMPERATURE, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from tests.sampling.harness import MAX_LEN, SLOTS, VOCAB, Request, make_slots, options, random_logits, run

EVERYTHING = options(
    min_tokens=4, temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5,
    frequency_penalty=2.0, logit_bias=((3, -1.5), (199, 100.0)), allowed_token_ids=(0, 31, 32, 199),
    bad_words=((5,), (6, 7, 8)), eos_ids=frozenset({2}), stop_ids=frozenset({2, 9}), seed=0xFEDCBA9876543210,
    logprobs=3, prompt_logprobs=0)


def test_every_option_arrives_in_its_slot():
    slots = make_slots([Request(EVERYTHING, prompt=[10, 11], output=[12])])
    ints, floats = np.asarray(slots.ints[0]), np.asarray(slots.floats[0])

    assert dict(zip(Int, ints)) == {
        Int.PROMPT_LEN: 2, Int.MIN_LEN: 6, Int.TOP_K: 7, Int.SEED_HIGH: np.uint32(0xFEDCBA98).view(np.int32),
        Int.SEED_LOW: np.uint32(0x76543210).view(np.int32), Int.LOGPROBS: 3, Int.PROMPT_LOGPROBS: 0,
        Int.NUM_END_IDS: 2, Int.NUM_BIAS: 2, Int.NUM_BAD_WORDS: 2, Int.HAS_ALLOWED: 1}
    assert dict(zip(Float, floats)) == {
        Float.TEMPERATURE: 0.5, Float.TOP_P: 0.5, Float.MIN_P: 0.25, Float.REPETITION: 1.5,
        Float.PRESENCE: -0.5, Float.FREQUENCY: 2.0}
    assert slots.tokens[0, :4].tolist() == [10, 11, 12, 0]
    assert slots.end_ids[0, :2].tolist() == [2, 9]
    assert slots.bias_ids[0, :2].tolist() == [3, 199]
    assert slots.bias_values[0, :2].tolist() == [-1.5, 100.0]
    assert slots.bad_words[0, :2, -3:].tolist() == [[-1, -1, 5], [6, 7, 8]]
    bits = (np.asarray(slots.allowed[0])[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.flatnonzero(bits).tolist() == [0, 31, 32, 199]


def test_admission_touches_no_other_slot():
    before = make_slots([Request(EVERYTHING)] * SLOTS)
    ints, floats = pack_slot(options(seed=1), 1, [42], MAX_LEN, VOCAB)
    after = admit(before, np.int32(5), ints, floats)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        old, new = np.asarray(old), np.asarray(new)
        others = np.arange(SLOTS + 1) != 5
        np.testing.assert_array_equal(old[others], new[others])
    assert after.tokens[5, 0] == 42


def test_what_an_earlier_sequence_left_in_the_slot_changes_nothing():
    stale = make_slots([Request(EVERYTHING)] * SLOTS)
    requests = [Request(options(seed=slot, temperature=1.0 if slot % 2 else 0.0)) for slot in range(SLOTS)]
    logits = random_logits(0, SLOTS)
    args = range(SLOTS), [r.position for r in requests]
    fresh, reused = run(logits, make_slots(requests), *args), run(logits, make_slots(requests, stale), *args)
    jax.tree.map(np.testing.assert_array_equal, fresh, reused)


def test_shapes_follow_from_three_numbers():
    slots = init_slots(SLOTS, MAX_LEN, VOCAB)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), slots) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_slots(SLOTS, MAX_LEN, VOCAB))
    ints, floats = pack_slot(options(), 0, [], MAX_LEN, VOCAB)
    assert (ints.size, floats.size) == packed_sizes(MAX_LEN, VOCAB)
    assert (ints.dtype, floats.dtype) == (np.int32, np.float32)


def test_slots_without_a_sequence_want_no_logprobs():
    slots = init_slots(SLOTS, MAX_LEN, VOCAB)
    assert (slots.ints[:, [Int.LOGPROBS, Int.PROMPT_LOGPROBS]] == -1).all()


def test_tables_hold_their_limits():
    full = options(
        logit_bias=tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS)),
        bad_words=((1,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS,
        stop_ids=frozenset(range(MAX_END_IDS)))
    ints, _ = pack_slot(full, 1, list(range(MAX_LEN)), MAX_LEN, 1000)
    assert ints[Int.NUM_BIAS] == MAX_LOGIT_BIAS
    assert ints[Int.NUM_BAD_WORDS] == MAX_BAD_WORDS
    assert ints[Int.NUM_END_IDS] == MAX_END_IDS


@pytest.mark.parametrize("fields", [
    {"logit_bias": tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1))},
    {"bad_words": ((1,),) * (MAX_BAD_WORDS + 1)},
    {"bad_words": ((1,) * (MAX_BAD_WORD_TOKENS + 1),)},
    {"stop_ids": frozenset(range(MAX_END_IDS)), "eos_ids": frozenset({500})},
    {"top_k": -1},
    {"temperature": GREEDY_TEMPERATURE / 2},
])
def test_what_the_processor_should_have_refused_or_resolved(fields):
    with pytest.raises(AssertionError):
        pack_slot(options(**fields), 1, [1], MAX_LEN, 1000)
