"""Where sampling takes another method on TPUs, for its compiler's sake, it gives the same bits."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax

from jaxserve.engine.request import SequenceOptions
from jaxserve.sampling import blocks, sampler
from tests.sampling.harness import MAX_LOGPROBS, VALID, VOCAB, Request, make_slots, options, random_logits
from tests.sampling.test_processors import ALL, HISTORY

REQUESTS = [
    Request(options(**ALL), **HISTORY),
    Request(options(**ALL, temperature=0.8, logprobs=MAX_LOGPROBS), **HISTORY),
    Request(options(temperature=1.0, top_k=40, top_p=0.9), **HISTORY),
    Request(options(temperature=1.0, top_k=150, top_p=0.9, min_p=0.01)),
    Request(SequenceOptions(max_tokens=4, temperature=0.0)),
]


@pytest.fixture
def as_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes what is traced from then on take the TPU's branch."""
    return lambda: monkeypatch.setattr(lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))


def test_a_tpu_chooses_the_same_tokens(as_on_a_tpu: Callable[[], None]):
    logits = random_logits(5, len(REQUESTS))
    arguments = (logits, np.arange(len(REQUESTS), dtype=np.int32),
                 np.array([request.position for request in REQUESTS], np.int32), np.ones(len(REQUESTS), bool),
                 make_slots(REQUESTS))

    def sample(*arguments):
        return jax.jit(lambda *a: sampler.sample(*a, valid_vocab=VALID, max_logprobs=MAX_LOGPROBS))(*arguments)

    here = sample(*arguments)
    as_on_a_tpu()
    there = sample(*arguments)
    jax.tree.map(np.testing.assert_array_equal, there, here)


@pytest.mark.parametrize("k", [1, 20, 200])
def test_a_tpu_finds_the_same_best_entries_among_ties(k: int, as_on_a_tpu: Callable[[], None]):
    x = np.random.default_rng(k).integers(0, 9, (4, 100 * VOCAB)).astype(np.float32)
    x[0] = -np.inf
    here = blocks.top_k(blocks.to_blocks(x), k)
    as_on_a_tpu()
    jax.tree.map(np.testing.assert_array_equal, blocks.top_k(blocks.to_blocks(x), k), here)
