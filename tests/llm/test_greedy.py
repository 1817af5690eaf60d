"""What the engine generates greedily is what the model says, whatever the schedule."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from tests.llm import tiny
from tests.llm.tiny import prompt_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Around pages (8), blocks of prefill rows (32) and the token budget (64), beyond which prompts come in chunks.
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


def test_batched_and_in_another_order(llm, expected):
    for lengths in (LENGTHS, LENGTHS[::-1]):
        llm.reset_prefix_cache()
        outputs = llm.generate([prompt_ids(n, seed=n) for n in lengths], GREEDY, use_tqdm=False)
        assert ids(outputs) == [expected[n] for n in lengths]


def test_a_prefix_hit_changes_nothing(llm, expected):
    for n in LENGTHS:
        llm.reset_prefix_cache()
        miss, hit = (llm.generate(prompt_ids(n, seed=n), GREEDY, use_tqdm=False)[0] for _ in range(2))
        assert ids([miss, hit]) == [expected[n], expected[n]]
        # Whole pages, and at least one token is computed.
        assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, (n - 1) // 8 * 8)


def test_a_chat_turn_goes_on_where_the_last_one_ended(llm, dense):
    llm.reset_prefix_cache()
    prompt = prompt_ids(21)
    [first] = llm.generate(prompt, GREEDY, use_tqdm=False)
    turn = prompt + first.outputs[0].token_ids + prompt_ids(10, seed=1)
    [second] = llm.generate(turn, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == 32  # of 33 tokens the last one was never computed
    assert second.outputs[0].token_ids == dense.greedy(turn, 12)


def test_requests_that_end_at_different_steps(llm, dense):
    prompts = [prompt_ids(n, seed=100 + n) for n in (3, 40, 9, 17, 70, 5, 33)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 20, 3, 11, 2, 30, 7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert ids(outputs) == [dense.greedy(p, s.max_tokens) for p, s in zip(prompts, params)]


def test_from_a_local_directory(tmp_path, xla_cache, expected):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    save_file(tiny.random_tensors(), tmp_path / "model.safetensors")
    tiny.tokenizer().save(tmp_path)
    with LLM(tmp_path, compilation_cache_dir=xla_cache, **tiny.ENGINE) as llm:
        assert ids(llm.generate([prompt_ids(n, seed=n) for n in (9, 65)], GREEDY, use_tqdm=False)) == [
            expected[9], expected[65]]
