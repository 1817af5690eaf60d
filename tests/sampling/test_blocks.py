"""The block-wise argmax and top-k are exact, ties included."""

import jax
import numpy as np
import pytest

from jaxserve.sampling import blocks


def rows_with_ties(vocab: int) -> np.ndarray:
    """Few distinct values, so that most entries tie."""
    rng = np.random.default_rng(vocab)
    return np.stack([rng.integers(0, top, vocab) for top in (1, 2, 5, 1000)]).astype(np.float32) - 2


@jax.jit
def argmax(x):
    x = blocks.to_blocks(x)
    return *blocks.argmax(x), blocks.has_nan(x)


@pytest.mark.parametrize("vocab", [1, 128, 129, 1000])
def test_argmax_takes_the_lowest_id(vocab):
    x = rows_with_ties(vocab)
    value, ids, _ = argmax(x)
    assert ids.tolist() == x.argmax(axis=-1).tolist()
    assert value.tolist() == x.max(axis=-1).tolist()


@pytest.mark.parametrize("vocab, k", [(1, 1), (129, 3), (129, 129), (1000, 5), (1000, 300)])
def test_top_k_is_a_stable_descending_sort(vocab, k):
    x = rows_with_ties(vocab)
    values, ids = jax.jit(lambda x: blocks.top_k(blocks.to_blocks(x), k))(x)
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == np.take_along_axis(x, expected, axis=-1).tolist()


@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_nan_is_found_and_infinities_are_not_taken_for_one(place):
    x = rows_with_ties(1000)
    x[1, place], x[2, place], x[3, :] = np.nan, np.inf, -np.inf
    assert argmax(x)[-1].tolist() == [False, True, False, False]
