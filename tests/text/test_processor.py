"""The processor: a request that leaves it can be run, one that cannot is refused with its numbers."""

from __future__ import annotations

import pytest

from jaxserve.engine.processor import Processor, eos_token_ids
from jaxserve.errors import ConfigError, RequestError
from jaxserve.sampling_params import SamplingParams


@pytest.fixture
def make(make_byte_level, make_config):
    """A processor over a byte-level tokenizer (or a given one) with max_model_len 64 and 512 ids."""
    def make(tokenizer="bytes", *, config=None, eos_ids=frozenset({257}), generation_config=None, base_seed=0):
        tokenizer = make_byte_level() if tokenizer == "bytes" else tokenizer
        return Processor(tokenizer, make_config(**(config or {})), eos_ids, generation_config or {}, base_seed)

    return make


def refused(processor, prompt, params=None, **changes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor.process(prompt, params or SamplingParams(**changes))
    return caught.value


# --- Prompts ----------------------------------------------------------------------------------------------------

def test_text_and_ids_and_dicts_are_prompts(make):
    processor, params = make(), SamplingParams()
    text = processor.process("hi", params)
    assert (text.prompt, text.prompt_token_ids) == ("hi", [104, 105])
    assert processor.process({"prompt": "hi"}, params).prompt_token_ids == [104, 105]
    for prompt in ([104, 105], (104, 105), {"prompt_token_ids": [104, 105]}):
        ids = processor.process(prompt, params)
        assert (ids.prompt, ids.prompt_token_ids) == (None, [104, 105])


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(make, prompt):
    error = refused(make(), prompt)
    assert error.param == "prompt" and "empty" in str(error)


def test_an_empty_text_is_its_bos(make, make_byte_level):
    tokenizer = make_byte_level(bos=True)
    processed = make(tokenizer).process("", SamplingParams())
    assert processed.prompt_token_ids == [tokenizer.token_to_id("<s>")]


def test_text_gets_bos_once_and_ids_none(make, make_byte_level):
    tokenizer = make_byte_level(bos=True)
    bos, processor = tokenizer.token_to_id("<s>"), make(tokenizer)
    assert processor.process("hi", SamplingParams()).prompt_token_ids == [bos, 104, 105]
    assert processor.process([bos, 104], SamplingParams()).prompt_token_ids == [bos, 104]


@pytest.mark.parametrize("prompt", [
    None, 5, 1.5, b"hi", [1.0], ["hi"], [None], [True], [[1]], [-1], [2**40], {"prompt": [1]},
    {"prompt_token_ids": "hi"}, {}, {"prompt": "a", "prompt_token_ids": [1]}, {"text": "a"}, {"prompt": None}])
def test_what_is_no_prompt_is_refused(make, prompt):
    assert refused(make(), prompt).param == "prompt"


def test_prompt_ids_end_where_the_embedding_ends(make):
    processor = make(config={"vocab_size": 300})
    assert processor.process([299], SamplingParams()).prompt_token_ids == [299]
    message = str(refused(processor, [5, 300]))
    assert "300" in message and "299" in message


def test_text_whose_tokens_the_model_lacks_is_refused(make):
    assert "the token id 105" in str(refused(make(config={"vocab_size": 100}), "hi"))


def test_a_lone_surrogate_is_refused_and_nul_is_text(make):
    assert "surrogate at character 1" in str(refused(make(), "a\ud800"))
    assert make().process("a\0b", SamplingParams()).prompt_token_ids == [97, 0, 98]


def test_without_a_tokenizer_prompts_are_ids_and_there_is_no_text(make):
    processor = make(None)
    processed = processor.process([1, 2], SamplingParams())
    assert processed.prompt_token_ids == [1, 2] and processed.params.detokenize is False
    assert refused(processor, "hi").param == "prompt"
    assert refused(processor, [1], stop="x").param == "stop"
    assert refused(processor, [1], bad_words=["x"]).param == "bad_words"
    assert processor.process([1], SamplingParams(stop=[], bad_words=[])).options


# --- Lengths ----------------------------------------------------------------------------------------------------

def max_tokens_of(processor, prompt_len: int, **changes) -> int:
    return processor.process([1] * prompt_len, SamplingParams(**changes)).options[0].max_tokens


def test_by_default_a_request_may_use_the_rest_of_the_context(make):
    assert max_tokens_of(make(), 10) == 54
    assert max_tokens_of(make(), 63) == 1


@pytest.mark.parametrize("prompt_len", [64, 65, 640])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(make, prompt_len):
    for params in (SamplingParams(), SamplingParams(max_tokens=1)):
        error = refused(make(), [1] * prompt_len, params)
        assert error.param == "prompt"
        assert f"{prompt_len} tokens" in str(error) and "64" in str(error) and "63" in str(error)


def test_max_tokens_must_fit_into_what_is_left(make):
    assert max_tokens_of(make(), 59, max_tokens=5) == 5
    assert max_tokens_of(make(), 59, max_tokens=1) == 1
    error = refused(make(), [1] * 59, max_tokens=6)
    assert error.param == "max_tokens"
    assert all(number in str(error) for number in ("6", "59", "5", "64"))


def test_min_tokens_must_fit_into_what_is_left(make):
    assert refused(make(), [1] * 59, min_tokens=6).param == "min_tokens"
    assert make().process([1] * 59, SamplingParams(min_tokens=5)).options[0].min_tokens == 5


def test_scoring_a_prompt_runs_as_one_token(make):
    assert max_tokens_of(make(), 10, max_tokens=0, prompt_logprobs=1) == 1


# --- Ids and limits ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given", [
    {"logit_bias": {512: 1}}, {"logit_bias": {191222: -100}}, {"allowed_token_ids": [512]},
    {"allowed_token_ids": [5, 512]}, {"stop_token_ids": [512]}])
def test_ids_the_model_does_not_have_are_refused(make, given):
    error = refused(make(), "hi", **given)
    assert error.param in given and "511" in str(error)


def test_ids_beyond_the_tokenizer_but_inside_the_model_are_fine(make):
    given = SamplingParams(logit_bias={511: 1.0}, allowed_token_ids=[511, 3, 3], stop_token_ids=[511])
    options = make().process("hi", given).options[0]
    assert options.logit_bias == ((511, 1.0),)
    assert options.allowed_token_ids == (3, 511)
    assert options.stop_ids == {511}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_have_a_limit(make, name):
    processor = make(config={"max_logprobs": 7})
    assert getattr(processor.process("hi", SamplingParams(**{name: 7})).options[0], name) == 7
    for value in (8, 1_000_000):
        error = refused(processor, "hi", **{name: value})
        assert error.param == name and "7" in str(error) and "max_logprobs" in str(error)


def test_priority_needs_the_priority_policy(make):
    assert refused(make(), "hi", priority=1).param == "priority"
    assert make(config={"scheduling_policy": "priority"}).process("hi", SamplingParams(priority=1))


def test_a_request_whose_masks_leave_nothing_is_refused(make):
    processor = make()
    assert refused(processor, "hi", allowed_token_ids=[97], bad_words=["a"]).param == "allowed_token_ids"
    assert refused(processor, "hi", allowed_token_ids=[257], min_tokens=1).param == "allowed_token_ids"
    assert refused(processor, "hi", allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1)
    assert "0 to 257" in str(refused(processor, "hi", allowed_token_ids=[258, 511]))
    assert refused(make(config={"vocab_size": 2}), [1], bad_words=["\0", "\x01"]).param == "bad_words"
    assert processor.process("hi", SamplingParams(allowed_token_ids=[257]))
    assert processor.process("hi", SamplingParams(allowed_token_ids=[257], min_tokens=1, ignore_eos=True))


def test_one_bad_request_leaves_the_processor_usable(make):
    processor = make()
    refused(processor, "hi", logit_bias={191222: -100})
    assert processor.process("hi", SamplingParams()).prompt_token_ids == [104, 105]


# --- Bad words --------------------------------------------------------------------------------------------------

def test_a_word_is_banned_in_spellings_of_different_length(make, make_byte_level):
    merges = [tuple(pair.encode() for pair in merge.split("+")) for merge in (
        "e+x a+g ag+g agg+e agge+r a+t at+e ate+d").split()]
    tokenizer = make_byte_level(merges=(*merges, (b" ", b"ex"), (b" ex", b"agger"), (b" exagger", b"ated")))
    ids = {entry: i for i, entry in enumerate(tokenizer.entry_bytes)}
    assert tokenizer.encode("is exaggerated") == [ids[b"i"], ids[b"s"], ids[b" exaggerated"]]
    words = make(tokenizer).process("is", SamplingParams(bad_words=["exaggerated"])).options[0].bad_words
    assert set(words) == {(ids[b" exaggerated"],), (ids[b"ex"], ids[b"agger"], ids[b"ated"])}


def test_bos_is_no_part_of_a_bad_word(make, make_byte_level):
    tokenizer = make_byte_level(bos=True)
    words = make(tokenizer).process("a", SamplingParams(bad_words=["the"])).options[0].bad_words
    assert set(words) == {tuple(b"the"), tuple(b" the")}


def test_sentencepiece_words_are_banned_with_and_without_their_space(make, sp_tokenizer):
    processor = make(sp_tokenizer)
    spelled = {tuple(map(sp_tokenizer.id_to_token, word))
               for word in processor.process("a", SamplingParams(bad_words=["the"])).options[0].bad_words}
    assert {("\u2581the",), ("the",)} <= spelled


def test_a_leading_space_of_a_bad_word_makes_no_difference(make):
    processor = make()
    with_space, without = (
        processor.process("a", SamplingParams(bad_words=[word])).options[0].bad_words for word in (" the", "the"))
    assert with_space == without


def test_white_space_can_be_a_bad_word(make):
    assert (10,) in make().process("a", SamplingParams(bad_words=["\n"])).options[0].bad_words


def test_bad_words_have_limits(make):
    assert "17 tokens" in str(refused(make(), "a", bad_words=["x" * 17]))
    assert "130 spellings" in str(refused(make(), "a", bad_words=[f"w{i}" for i in range(65)]))


# --- Defaults ---------------------------------------------------------------------------------------------------

def sampling(processor, **changes) -> tuple:
    options = processor.process("a", SamplingParams(**changes)).options[0]
    return options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty


def test_without_a_generation_config_values_are_neutral(make):
    assert sampling(make()) == (1.0, 0, 1.0, 0.0, 1.0)


def test_the_generation_config_gives_what_the_request_leaves_open(make):
    checkpoint = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1,
                  "max_new_tokens": 3, "do_sample": True, "eos_token_id": 5}
    processor = make(generation_config=checkpoint)
    assert sampling(processor) == (0.7, 20, 0.8, 0.1, 1.1)
    assert sampling(processor, temperature=0.5, top_k=0, top_p=1, min_p=0, repetition_penalty=1) == (0.5, 0, 1, 0, 1)
    assert max_tokens_of(processor, 10) == 54


def test_a_checkpoint_that_does_not_sample_is_greedy_unless_asked(make):
    processor = make(generation_config={"do_sample": False, "temperature": 0.7, "top_p": None})
    assert sampling(processor)[0] == 0.0
    assert sampling(processor, temperature=0.9)[0] == 0.9


@pytest.mark.parametrize("value", [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": -5}])
def test_a_broken_generation_config_is_an_error_of_the_engine(make, value):
    with pytest.raises(ConfigError, match="use_generation_config"):
        make(generation_config=value)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-40, 1e-8, 9e-6])
def test_greedy_requests_are_all_alike(make, temperature):
    assert sampling(make(), temperature=temperature, top_k=5, top_p=0.5, min_p=0.5) == (0.0, 0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("top_k", [-1, 0, 512, 513, 2**31 - 1])
def test_top_k_without_effect_is_off(make, top_k):
    assert sampling(make(), top_k=top_k)[1] == 0


def test_top_k_below_the_vocabulary_is_kept(make):
    assert sampling(make(), top_k=511)[1] == 511


# --- EOS --------------------------------------------------------------------------------------------------------

def test_every_eos_of_the_checkpoint_counts(make_byte_level):
    tokenizer = make_byte_level()
    assert eos_token_ids(tokenizer, {}, {}, 512) == {257}
    assert eos_token_ids(tokenizer, {"eos_token_id": 3}, {"eos_token_id": 4}, 512) == {3, 4, 257}
    assert eos_token_ids(tokenizer, {"eos_token_id": [3, 4]}, {"eos_token_id": None}, 512) == {3, 4, 257}
    assert eos_token_ids(make_byte_level(eos=False), {"eos_token_id": [3, 4]}, {}, 512) == {3, 4}
    assert eos_token_ids(make_byte_level(eos=False), {}, {}, 512) == frozenset()
    assert eos_token_ids(None, {"eos_token_id": [3, 9000]}, {}, 512) == {3}


def test_eos_ends_unless_ignored(make):
    processor = make(eos_ids=frozenset({3, 4}))
    assert processor.process("a", SamplingParams()).options[0].eos_ids == {3, 4}
    assert processor.process("a", SamplingParams(ignore_eos=True)).options[0].eos_ids == frozenset()


def test_min_tokens_works_without_any_eos(make):
    assert make(eos_ids=frozenset()).process("a", SamplingParams(min_tokens=4)).options[0].min_tokens == 4


# --- Seeds ------------------------------------------------------------------------------------------------------

def seeds(processor, **changes) -> list[int]:
    return [options.seed for options in processor.process("a", SamplingParams(**changes)).options]


def test_a_seed_fixes_each_completion_whatever_else_is_asked(make):
    assert seeds(make(base_seed=1), seed=5, n=8) == seeds(make(base_seed=2), seed=5, n=8)
    assert seeds(make(), seed=5, n=8)[:1] == seeds(make(), seed=5)
    assert len(set(seeds(make(), seed=5, n=8) + seeds(make(), seed=6, n=8) + seeds(make(), seed=-5, n=8))) == 24
    assert all(0 <= seed < 2**64 for seed in seeds(make(), seed=-1, n=100))


def test_unseeded_requests_all_differ(make):
    processor = make()
    drawn = [seed for _ in range(6) for seed in seeds(processor, n=3)]
    assert len(set(drawn)) == 18


def test_the_engine_seed_repeats_unseeded_requests_in_order(make):
    one, two = make(base_seed=7), make(base_seed=7)
    assert [seeds(one), seeds(one)] == [seeds(two), seeds(two)]
    assert seeds(make(base_seed=None)) != seeds(make(base_seed=None))


def test_more_end_ids_than_a_slot_holds_are_refused(make):
    processor = make(eos_ids=frozenset(range(300, 340)))
    error = refused(processor, "hi", stop_token_ids=list(range(128)))
    assert error.param == "stop_token_ids" and "168 together, at most 144" in str(error)
    processor.process("hi", SamplingParams(stop_token_ids=list(range(128)), ignore_eos=True))
