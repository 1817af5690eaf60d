"""Every sampling option, through the facade."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import RequestError, SamplingParams
from tests.llm import tiny
from tests.llm.tiny import EOS, FIRST_EXTRA, prompt_ids

PROMPT = prompt_ids(20)


def run(llm, **options) -> list[int]:
    options = {"max_tokens": 8, "ignore_eos": True} | options
    return llm.generate(PROMPT, SamplingParams(**options), use_tqdm=False)[0].outputs[0].token_ids


def follow(dense, choose, count: int = 8) -> list[int]:
    """The ids that `choose(logits of the next token, ids so far)` picks one after the other."""
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(choose(dense.logits(ids)[-1], ids)))
    return ids[len(PROMPT):]


# -- choosing a token


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"temperature": 1e-5}, {"temperature": 1e-8}, {"temperature": 1e-40},
    {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
], ids=str)
def test_what_is_greedy(llm, dense, options):
    assert run(llm, **options) == dense.greedy(PROMPT, 8)


@pytest.mark.parametrize("top_k", [3, 2**31 - 1, 0, -1])
def test_top_k(llm, dense, top_k):
    drawn = {token for seed in range(40) for token in run(llm, temperature=50, top_k=top_k, seed=seed, max_tokens=1)}
    best = np.argsort(-dense.logits(PROMPT)[-1])[:3].tolist()
    if top_k == 3:
        assert drawn == set(best)
    else:
        assert len(drawn) > 20


def hot_logprobs(dense, temperature: float) -> np.ndarray:
    logits = dense.logits(PROMPT)[-1] / temperature
    return logits - np.log(np.exp(logits).sum())


def test_top_p_keeps_the_smallest_set_with_the_mass(llm, dense):
    probabilities = np.exp(hot_logprobs(dense, 3))
    order = np.argsort(-probabilities)
    kept = set(order[:np.searchsorted(np.cumsum(probabilities[order]), 0.3) + 1].tolist())
    assert 3 < len(kept) < 40
    drawn = {run(llm, temperature=3, top_p=0.3, seed=seed, max_tokens=1)[0] for seed in range(60)}
    assert drawn <= kept and len(drawn) > 3


def test_min_p_is_relative_to_the_best(llm, dense):
    logprobs = hot_logprobs(dense, 3)
    kept = set(np.flatnonzero(logprobs >= logprobs.max() + np.log(0.4)).tolist())
    assert 3 < len(kept) < 40
    drawn = {run(llm, temperature=3, min_p=0.4, seed=seed, max_tokens=1)[0] for seed in range(60)}
    assert drawn <= kept and len(drawn) > 3


# -- changing the logits


def test_repetition_penalty(llm, dense):
    def choose(logits, ids):
        seen = np.isin(np.arange(len(logits)), ids)
        return np.where(seen, np.where(logits > 0, logits / 1.8, logits * 1.8), logits).argmax()

    expected = follow(dense, choose)
    assert run(llm, temperature=0, repetition_penalty=1.8) == expected != dense.greedy(PROMPT, 8)


def test_presence_and_frequency_penalties_count_the_output_only(llm, dense):
    def choose(logits, ids):
        counts = np.bincount(ids[len(PROMPT):], minlength=len(logits))
        return (logits - 0.4 * (counts > 0) - 1.5 * counts).argmax()

    expected = follow(dense, choose, 30)
    assert run(llm, temperature=0, presence_penalty=0.4, frequency_penalty=1.5, max_tokens=30) == expected
    assert expected != dense.greedy(PROMPT, 30)


def test_logit_bias(llm, dense):
    best = dense.greedy(PROMPT, 1)[0]
    expected = follow(dense, lambda logits, _: (logits - 100 * (np.arange(len(logits)) == best)).argmax())
    assert run(llm, temperature=0, logit_bias={best: -100}) == expected
    assert run(llm, temperature=0, logit_bias={17: 100}) == [17] * 8


def test_allowed_token_ids_mask_this_request_only(llm, dense):
    allowed = [3, 9, 200]
    masked, free = llm.generate(
        [PROMPT, PROMPT], [SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=allowed),
                           SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)], use_tqdm=False)
    assert masked.outputs[0].token_ids == follow(dense, lambda logits, _: allowed[logits[allowed].argmax()])
    assert free.outputs[0].token_ids == dense.greedy(PROMPT, 8)


def test_rows_of_the_embedding_without_a_token_are_never_sampled(llm):
    drawn = {token for seed in range(10) for token in run(llm, temperature=100, seed=seed, max_tokens=60)}
    assert len(drawn) > 200 and max(drawn) < tiny.tokenizer().vocab_size


def test_bad_words(parrot_of):
    # " exaggerated" is one token, "exaggerated" eleven; the parrot would say the first.
    llm = parrot_of([*b"is", tiny.EXAGGERATED, *b"ly"])
    params = SamplingParams(temperature=0, max_tokens=4)
    assert llm.generate("i", params, use_tqdm=False)[0].text == "s exaggeratedly"
    assert "exaggerated" not in llm.generate("i", params.clone(bad_words=["exaggerated"]), use_tqdm=False)[0].text


def test_a_bad_word_of_several_tokens(parrot):
    [output] = parrot.generate("a", temperature=0, max_tokens=6, bad_words=["cde"], use_tqdm=False)
    assert output.text.startswith("bcd") and output.text[3] != "e"


# -- ending


def said(parrot, **options):
    [output] = parrot.generate("a", SamplingParams(**({"temperature": 0, "max_tokens": 60} | options)), use_tqdm=False)
    return output.outputs[0]


def test_eos_ends_without_text(parrot):
    completion = said(parrot)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "bcdefghijklmnopqrstuvwxyz", "stop", None)
    assert completion.token_ids[-1] == EOS


def test_max_tokens(parrot):
    completion = said(parrot, max_tokens=3)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("bcd", "length", 3)


def test_max_tokens_defaults_to_the_rest_of_the_context(llm):
    [output] = llm.generate(prompt_ids(100), temperature=0, ignore_eos=True, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (28, "length")


def test_ignore_eos(parrot):
    assert len(said(parrot, ignore_eos=True).token_ids) == 60


@pytest.mark.parametrize(("options", "text", "stop_reason"), [
    ({"stop": "hij"}, "bcdefg", "hij"),
    ({"stop": ["zzz", "def"]}, "bc", "def"),
    ({"stop": "def", "include_stop_str_in_output": True}, "bcdef", "def"),
    ({"stop": "b", "min_tokens": 4}, "bcdefghijklmnopqrstuvwxyz", None),
    ({"stop": "a"}, "bcdefghijklmnopqrstuvwxyz", None),  # only in the prompt
    ({"stop": "ab"}, "bcdefghijklmnopqrstuvwxyz", None),  # begins in the prompt
    ({"stop_token_ids": [ord("e")]}, "bcd", ord("e")),
    ({"stop_token_ids": [ord("e")], "include_stop_str_in_output": True}, "bcde", ord("e")),
], ids=str)
def test_stopping(parrot, options, text, stop_reason):
    completion = said(parrot, **options)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", stop_reason)
    events = list(parrot.stream("a", SamplingParams(temperature=0, max_tokens=60, **options)))
    assert "".join(event.text for event in events) == text
    assert events[-1].output.outputs[0] == completion


def test_min_tokens_masks_every_end(parrot_of):
    llm = parrot_of([*b"xy", EOS])
    for options in ({}, {"stop_token_ids": [ord("y")]}):
        [output] = llm.generate("x", temperature=0, min_tokens=5, max_tokens=40, use_tqdm=False, **options)
        assert len(output.outputs[0].token_ids) > 5
        assert not {EOS, *options.get("stop_token_ids", ())} & set(output.outputs[0].token_ids[:5])


def test_a_request_whose_masks_leave_nothing(llm):
    with pytest.raises(RequestError, match="no token is left"):
        run(llm, allowed_token_ids=[EOS], min_tokens=1, ignore_eos=False)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}])
def test_a_request_whose_masks_leave_nothing_on_the_way(llm, options):
    before = llm.metrics()["not_finite"]
    params = SamplingParams(max_tokens=5, allowed_token_ids=[97], bad_words=["aa"], **options)
    outputs = llm.generate([[98], [97]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[97], []]
    for output in outputs:
        assert isinstance(output.error, RequestError) and output.error.param == "bad_words"
        assert "no token is left" in str(output.error)
    assert llm.metrics()["not_finite"] == before


# -- text


@pytest.fixture
def korean(parrot_of):
    """Answers "a" with "삼겹살🎉z"; no token holds a whole character, and one holds the ends of two."""
    chain = [*b"a\xec\x82\xbc\xea\xb2", FIRST_EXTRA, FIRST_EXTRA + 1, *"🎉z".encode(), EOS]
    assert tiny.tokenizer().decode(chain) == "a삼겹살🎉z"
    return parrot_of(chain)


def test_characters_stream_whole(korean):
    events = list(korean.stream("a", temperature=0))
    assert [event.text for event in events if event.text] == ["삼", "겹", "살", "🎉", "z"]
    assert korean.generate("a", temperature=0, use_tqdm=False)[0].text == "삼겹살🎉z"


def test_a_cut_character_is_the_same_in_both_modes(korean):
    params = SamplingParams(temperature=0, max_tokens=9)  # two of the four bytes of 🎉
    events = list(korean.stream("a", params))
    [output] = korean.generate("a", params, use_tqdm=False)
    assert "".join(event.text for event in events) == output.text
    assert output.text.rstrip("\N{REPLACEMENT CHARACTER}") == "삼겹살"
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 9)


def test_a_stop_string_inside_a_token(parrot_of):
    llm = parrot_of([*b"alph", FIRST_EXTRA + 2, ord("!")])
    [output] = llm.generate("al", temperature=0, max_tokens=9, stop=["gamma"], use_tqdm=False)
    assert (output.text, output.outputs[0].stop_reason) == ("ph, beta ", "gamma")


def test_special_tokens_are_shown_on_demand(parrot_of):
    llm = parrot_of([ord("q"), tiny.BOS, tiny.END_OF_TURN, ord("r"), EOS])

    def text(**options) -> str:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **options)
        return llm.generate("q", params, use_tqdm=False)[0].text

    assert text() == "r"
    assert text(skip_special_tokens=False) == "<s> <|end|>r"
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == "<s><|end|>r"
    assert text(detokenize=False) == ""


def test_every_source_of_eos_counts(parrot_of):
    # config.json names </s>, the tokenizer <|end|> too.
    llm = parrot_of([ord("q"), ord("r"), tiny.END_OF_TURN, ord("s")])
    [output] = llm.generate("q", temperature=0, max_tokens=9, use_tqdm=False)
    assert (output.text, output.outputs[0].finish_reason) == ("r", "stop")
