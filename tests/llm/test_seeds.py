"""A seeded request's ids are its own; unseeded ones differ from each other."""

from __future__ import annotations

from jaxserve import SamplingParams
from tests.llm.tiny import prompt_ids

PROMPTS = [prompt_ids(n, seed=n) for n in (1, 9, 33, 70, 5, 8)]
PARAMS = [SamplingParams(seed=11, max_tokens=10, ignore_eos=True),
          SamplingParams(seed=12, max_tokens=14, top_k=20, ignore_eos=True),
          SamplingParams(seed=13, max_tokens=6, top_p=0.8, ignore_eos=True),
          SamplingParams(seed=14, max_tokens=12, min_p=0.05, temperature=1.7, ignore_eos=True),
          SamplingParams(seed=-1, max_tokens=9, top_k=150, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
          SamplingParams(seed=2**64 - 1, max_tokens=11, presence_penalty=1, n=2, ignore_eos=True)]


def ids(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_neighbours_order_and_prefix_hits_change_nothing(llm):
    llm.reset_prefix_cache()
    alone = [ids(llm.generate(prompt, params, use_tqdm=False))[0] for prompt, params in zip(PROMPTS, PARAMS)]
    assert ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    llm.reset_prefix_cache()
    backwards = llm.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False)
    assert ids(backwards)[::-1] == alone


def test_requests_without_a_seed_differ(llm):
    params = SamplingParams(temperature=2, max_tokens=8, ignore_eos=True)
    together = llm.generate([[1, 2, 3]] * 6, params, use_tqdm=False)
    one_by_one = [llm.generate([1, 2, 3], params, use_tqdm=False)[0] for _ in range(6)]
    assert len({tuple(output.outputs[0].token_ids) for output in [*together, *one_by_one]}) == 12


def test_completions_differ_and_repeat_with_a_seed(llm):
    params = SamplingParams(n=8, temperature=2, max_tokens=8, ignore_eos=True)
    [unseeded] = llm.generate([1, 2, 3], params, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in unseeded.outputs}) == 8
    seeded = [llm.generate([1, 2, 3], params.clone(seed=5), use_tqdm=False)[0] for _ in range(2)]
    assert ids(seeded)[0] == ids(seeded)[1]
    assert len(set(map(tuple, ids(seeded)[0]))) == 8
    assert [completion.index for completion in seeded[0].outputs] == list(range(8))


def test_an_engines_seed_repeats_its_unseeded_requests(make_llm):
    def run(seed: int) -> list[list[list[int]]]:
        with make_llm(seed=seed) as llm:
            return ids(llm.generate([[1]] * 6, max_tokens=1, temperature=3, use_tqdm=False))

    first = run(3)
    assert run(3) == first
    assert run(4) != first
