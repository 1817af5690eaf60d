"""The workloads are fixed, so that numbers of different engines, machines and days can be compared."""

import hashlib
import json

import pytest

from jaxserve.bench.workloads import repetition


def digest(data) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


# Made with the workload generator of the comparison with other engines, which is not part of this package.
@pytest.mark.parametrize(("index", "expected"), [
    (0, "1238ae0c3fef6df6"), (1, "7d3ec962401da96d"), (2, "2d93c907fb156d38")])
def test_ids_are_those_of_the_comparison(index, expected):
    run = repetition(index)
    batches = (run.first_token, run.stream, run.mixed, run.shared_prefix)
    assert digest([[batch.prompts, batch.max_tokens] for batch in batches]) == expected


def test_sizes():
    run = repetition(3)
    assert (run.mixed.prompt_tokens, run.mixed.output_tokens, len(run.mixed.prompts)) == (8104, 4264, 32)
    assert run.shared_prefix.prompt_tokens == run.no_shared_prefix.prompt_tokens == 32 * 544


def test_repetitions_have_no_prompt_in_common():
    starts = [tuple(prompt[:16]) for index in range(4) for batch in vars(repetition(index)).values()
              for prompt in batch.prompts]
    shared = 4 * 31  # the prompts of shared_prefix have one start in each repetition
    assert len(set(starts)) == len(starts) - shared


def test_ids_fit_a_small_vocabulary():
    run = repetition(1, vocab_size=100)
    assert max(max(prompt) for prompt in run.mixed.prompts) < 100
