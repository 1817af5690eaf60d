"""Log-probabilities are those of the raw logits, best first, whatever the sampling options are."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.sampling.logprobs import gather_logprobs
from tests.sampling.harness import (
    MAX_LOGPROBS,
    VALID,
    VOCAB,
    Request,
    options,
    random_logits,
    sample_requests,
)


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row[:VALID].astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


gather = jax.jit(partial(gather_logprobs, valid_vocab=VALID), static_argnums=2)


def test_values_ranks_and_best_entries_are_those_of_the_reference():
    logits = random_logits(0, 4)
    targets = np.array([0, 7, 196, logits[3, :VALID].argmax()], np.int32)
    out = gather(logits, targets, 5)
    for row in range(4):
        expected = log_softmax(logits[row])
        best = np.argsort(-expected)[:5]
        np.testing.assert_allclose(out.token_logprob[row], expected[targets[row]], rtol=1e-6)
        assert out.token_rank[row] == 1 + (expected > expected[targets[row]]).sum()
        assert out.top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(out.top_logprobs[row], expected[best], rtol=1e-5, atol=1e-6)


def test_equal_logits_share_a_rank_and_are_listed_by_id():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [30, 150]] = 1.0
    out = gather(logits, np.array([150], np.int32), 5)
    assert out.token_rank[0] == 1
    assert out.top_ids[0].tolist() == [30, 150, 0, 1, 2]


def test_sampled_tokens_have_the_raw_logits_probabilities():
    logits = random_logits(1, 3)
    out = sample_requests(logits, [
        Request(options(logprobs=2)),
        Request(options(logprobs=0, temperature=1.5, top_k=3, seed=4)),
        Request(options(logprobs=5, allowed_token_ids=(8,), logit_bias=((8, 50.0),), repetition_penalty=2.0), [8]),
    ])
    for row in range(3):
        expected = log_softmax(logits[row])
        np.testing.assert_allclose(out.logprobs.token_logprob[row], expected[out.ids[row]], rtol=1e-5, atol=1e-6)
        assert out.logprobs.top_ids[row].tolist() == np.argsort(-expected)[:MAX_LOGPROBS].tolist()
    assert out.ids[2] == 8


def test_nobody_asks_nobody_pays():
    out = sample_requests(random_logits(2), [Request(options())])
    assert out.logprobs.top_ids.tolist() == [[-1] * MAX_LOGPROBS]


def test_no_entries_may_be_asked_for():
    logits = random_logits(3)
    out = gather(logits, np.array([5], np.int32), 0)
    assert out.top_ids.shape == out.top_logprobs.shape == (1, 0)
    np.testing.assert_allclose(out.token_logprob[0], log_softmax(logits[0])[5], rtol=1e-6)


def test_more_entries_than_the_vocabulary_has_are_marked():
    logits = np.array([[0.0, 1.0, 9.0]], np.float32)
    out = jax.jit(partial(gather_logprobs, k=4, valid_vocab=2))(logits, np.array([0]))
    assert out.top_ids[0].tolist() == [1, 0, -1, -1]
    np.testing.assert_allclose(np.exp(out.top_logprobs[0]).sum(), 1.0, rtol=1e-6)


def test_impossible_tokens_stay_representable_in_json():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 3] = 1.0
    out = gather(logits, np.array([7], np.int32), 5)
    json.dumps([out.token_logprob.tolist(), out.top_logprobs.tolist()], allow_nan=False)
    assert out.token_rank[0] == 2 and out.top_logprobs[0, 0] == 0.0


def test_an_id_that_the_tokenizer_lacks_has_no_probability():
    """A prompt of ids may hold it. Its logit is the largest here."""
    out = gather(random_logits(5), np.array([VALID], np.int32), 5)
    assert out.token_logprob[0] == np.finfo(np.float32).min and out.token_rank[0] == VALID + 1


@pytest.mark.parametrize("scale", [6e4, 1e30])
def test_large_logits_do_not_overflow(scale):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :2] = scale, -scale
    out = gather(logits, np.array([1], np.int32), 2)
    assert out.token_logprob[0] == np.float32(-2 * scale)
    assert out.top_logprobs[0].tolist() == [0.0, np.float32(-scale)]


def test_a_broken_row_does_not_touch_the_others():
    logits = random_logits(4, 3)
    fine = gather(logits, np.arange(3, dtype=np.int32), 5)
    logits[1, 50] = np.nan
    broken = gather(logits, np.arange(3, dtype=np.int32), 5)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), fine, broken)
