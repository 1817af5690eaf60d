"""What the engine generates greedily is what the model says, whatever the schedule."""

from __future__ import annotations

import pytest

from jaxserve import SamplingParams
from tests.llm.tiny import prompt_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Around pages (8), blocks of prefill rows (32) and the token budget (64).
LENGTHS = (1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 116)


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(dense) -> dict[int, list[int]]:
    return {n: dense.greedy(prompt_ids(n, seed=n), 12) for n in LENGTHS}


def test_one_at_a_time(llm, expected):
    for n in LENGTHS:
        llm.reset_prefix_cache()
        assert ids(llm.generate(prompt_ids(n, seed=n), GREEDY, use_tqdm=False)) == [expected[n]], n


def test_batched(llm, expected):
    llm.reset_prefix_cache()
    outputs = llm.generate([prompt_ids(n, seed=n) for n in LENGTHS], GREEDY, use_tqdm=False)
    assert ids(outputs) == [expected[n] for n in LENGTHS]
