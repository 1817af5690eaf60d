"""/v1/completions, through the openai client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from jaxserve import SamplingParams
from tests.llm import tiny

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def offline(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**({"temperature": 0, "ignore_eos": True} | params)),
                        use_tqdm=False)[0]


def joined(stream) -> tuple[dict[int, str], dict[int, list[str]], list]:
    """Texts and finish reasons by choice, and usages."""
    texts, reasons, usages = {}, {}, []
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                reasons.setdefault(choice.index, []).append(choice.finish_reason)
    return texts, reasons, usages


def test_whole_and_streamed_equal_the_offline_result(server, client):
    expected = offline(server.llm, "Hello", max_tokens=12)
    whole = client.completions.create(prompt="Hello", max_tokens=12, **GREEDY)
    assert whole.id.startswith("cmpl-") and whole.object == "text_completion" and whole.model == "tiny"
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == 5 and whole.usage.completion_tokens == 12
    texts, reasons, usages = joined(client.completions.create(prompt="Hello", max_tokens=12, stream=True, **GREEDY))
    assert texts == {0: expected.text} and reasons == {0: ["length"]} and usages == []


def test_the_default_is_sixteen_tokens_or_what_is_left(client):
    assert client.completions.create(prompt="Hello", **GREEDY).usage.completion_tokens == 16
    assert client.completions.create(prompt="x" * 125, **GREEDY).usage.completion_tokens == 3


def test_async_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(prompt="Hello", max_tokens=8, **GREEDY)
            text = ""
            async for chunk in await client.completions.create(prompt="Hello", max_tokens=8, stream=True, **GREEDY):
                text += chunk.choices[0].text
            return whole.choices[0].text, text

    whole, streamed = asyncio.run(main())
    assert whole == streamed == offline(server.llm, "Hello", max_tokens=8).text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_completions(server, client, stream):
    """cases 21, 96: index = prompt * n + i; prompts count once in the usage."""
    prompts = ["abc", "de", "f"]
    expected = [offline(server.llm, prompt, max_tokens=6).text for prompt in prompts for _ in range(2)]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(prompt=prompts, n=2, max_tokens=6, **GREEDY, **options)
    if stream:
        texts, reasons, (usage,) = joined(answer)
        assert texts == dict(enumerate(expected))
        assert reasons == {i: ["length"] for i in range(6)}
    else:
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == expected
        usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 36, 42)


def test_token_id_prompts(server, client):
    ids = tiny.prompt_ids(10)
    expected = offline(server.llm, ids, max_tokens=5)
    answer = client.completions.create(prompt=ids, max_tokens=5, model="tiny", temperature=0,
                                       extra_body={"ignore_eos": True, "return_token_ids": True})
    assert answer.choices[0].token_ids == expected.outputs[0].token_ids
    assert answer.choices[0].prompt_token_ids == ids
    answer = client.completions.create(prompt=[ids, ids[:4]], max_tokens=5, **GREEDY)
    texts = [choice.text for choice in answer.choices]
    assert texts == [expected.text, offline(server.llm, ids[:4], max_tokens=5).text]


def test_streamed_token_ids(server, client):
    expected = offline(server.llm, "Hello", max_tokens=9).outputs[0].token_ids
    chunks = list(client.completions.create(prompt="Hello", max_tokens=9, stream=True, model="tiny", temperature=0,
                                            extra_body={"ignore_eos": True, "return_token_ids": True}))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == expected
    assert chunks[0].choices[0].prompt_token_ids == list(b"Hello")


def test_truncated_prompts(server, client):
    expected = offline(server.llm, "cdef", max_tokens=4).text
    for prompt in ("abcdef", list(b"abcdef")):
        answer = client.completions.create(prompt=prompt, max_tokens=4, model="tiny", temperature=0,
                                           extra_body={"ignore_eos": True, "truncate_prompt_tokens": 4})
        assert answer.choices[0].text == expected and answer.usage.prompt_tokens == 4
    answer = client.completions.create(prompt="x" * 1000, max_tokens=4, model="tiny", temperature=0,
                                       extra_body={"ignore_eos": True, "truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 124


def test_cached_tokens_are_in_the_usage_and_a_salt_keeps_them_apart(client):
    def cached(**extra):
        answer = client.completions.create(prompt="this prompt fills three pages", max_tokens=1, model="tiny",
                                           extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="x") == 0
    assert cached(cache_salt="x") == 24
    assert cached(cache_salt="y") == 0


# -- stopping


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "text", "stop_reason"), [
    ({"stop": ["defghij"]}, "bc", "defghij"),  # case 5
    ({"stop": "d"}, "bc", "d"),
    ({"stop": "de", "extra_body": {"include_stop_str_in_output": True}}, "bcde", "de"),  # case 8
    ({"extra_body": {"stop_token_ids": [ord("e")]}}, "bcd", ord("e")),
    ({}, "bcdefghijklmnopqrstuvwxyz", None),
])
def test_stops(parrot, stream, options, text, stop_reason):
    with parrot.client() as client:
        answer = client.completions.create(model="tiny", prompt="a", max_tokens=60, temperature=0, stream=stream,
                                           **options)
        if not stream:
            choice = answer.choices[0]
            assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", stop_reason)
            return
        chunks = list(answer)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].stop_reason == stop_reason


def test_only_generated_text_counts_for_stops(parrot):
    """case 9"""
    with parrot.client() as client:
        answer = client.completions.create(model="tiny", prompt="xbc a", max_tokens=4, temperature=0,
                                           stop=["xbc", "ab"])
    assert answer.choices[0].text == "bcde"


# -- logprobs and echo


def test_logprobs(server, client):
    expected = offline(server.llm, "Hello", max_tokens=6, logprobs=2).outputs[0]
    choice = client.completions.create(prompt="Hello", max_tokens=6, logprobs=2, **GREEDY).choices[0]
    table = choice.logprobs
    assert table.token_logprobs == [p[i].logprob for i, p in zip(expected.token_ids, expected.logprobs)]
    assert all(len(top) <= 3 for top in table.top_logprobs)
    assert len(table.tokens) == len(table.text_offset) == 6
    chunks = list(client.completions.create(prompt="Hello", max_tokens=6, logprobs=2, stream=True, **GREEDY))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks if chunk.choices[0].logprobs is not None]
        assert sum(parts, []) == getattr(table, name)


def test_text_offsets_with_a_stop_string_held_back(parrot):
    """case 36"""
    with parrot.client() as client:
        chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0, logprobs=1,
                                                stop=["efgX"], stream=True))
    tables = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert sum((table.text_offset for table in tables), []) == list(range(8))
    assert "".join(sum((table.tokens for table in tables), [])) == "bcdefghi"


def test_tokens_as_ids(parrot):
    with parrot.client() as client:
        answer = client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0, logprobs=0,
                                           extra_body={"return_tokens_as_token_ids": True})
    assert answer.choices[0].logprobs.tokens == ["token_id:98", "token_id:99"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server, client, stream):
    expected = "Hello" + offline(server.llm, "Hello", max_tokens=5).text
    for prompt in ("Hello", list(b"Hello")):
        answer = client.completions.create(prompt=prompt, max_tokens=5, echo=True, stream=stream, **GREEDY)
        assert (joined(answer)[0] if stream else {0: answer.choices[0].text}) == {0: expected}


def test_echo_scores_the_prompt(server, client):
    """cases 38, 39: what lm-eval does."""
    expected = offline(server.llm, list(b"Hello"), max_tokens=1, prompt_logprobs=1, logprobs=1)
    choice = client.completions.create(prompt=list(b"Hello"), max_tokens=1, echo=True, logprobs=1, **GREEDY).choices[0]
    scores = [None] + [position[token].logprob for token, position
                       in zip(b"Hello"[1:], expected.prompt_logprobs[1:])]
    scores.append(expected.outputs[0].logprobs[0][expected.outputs[0].token_ids[0]].logprob)
    assert choice.logprobs.token_logprobs == pytest.approx(scores, abs=1e-5)
    assert choice.logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    assert choice.logprobs.tokens[:5] == list("Hello")


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_echoes_begins_with_the_scored_prompt(client, n):
    options = {"prompt": ["Hello", "ab"], "n": n, "max_tokens": 6, "echo": True, "logprobs": 1} | GREEDY
    whole = client.completions.create(**options).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    for expected in whole:
        mine = [choice for choice in chunks if choice.index == expected.index]
        prompt = options["prompt"][expected.index // n]
        assert mine[0].text == prompt and mine[0].logprobs.tokens == list(prompt) and mine[0].finish_reason is None
        assert "".join(choice.text for choice in mine) == expected.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined_up = sum((getattr(choice.logprobs, name) for choice in mine if choice.logprobs), [])
            assert joined_up == pytest.approx(getattr(expected.logprobs, name), abs=1e-5) if name != "tokens" else \
                joined_up == expected.logprobs.tokens


def test_usage_in_every_chunk_if_asked_for(client):
    chunks = list(client.completions.create(
        prompt="Hello", max_tokens=5, stream=True, **GREEDY,
        stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and {chunk.usage.prompt_tokens for chunk in chunks} == {5}
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 10


def test_scoring_without_generating(client):
    """case 38"""
    for logprobs in (None, 1):
        answer = client.completions.create(prompt="Hello", max_tokens=0, echo=True, logprobs=logprobs, model="tiny")
        assert answer.choices[0].text == "Hello" and answer.usage.completion_tokens == 0
        assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.token_logprobs[0] is None and len(answer.choices[0].logprobs.tokens) == 5
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(prompt="Hello", max_tokens=0, model="tiny")


def test_prompt_logprobs(client):
    answer = client.completions.create(prompt="Hello", max_tokens=1, model="tiny", extra_body={"prompt_logprobs": 1})
    first, second, *rest = answer.choices[0].prompt_logprobs
    assert first is None and len(rest) == 3
    assert set(second[str(ord("e"))]) == {"logprob", "rank", "decoded_token"}


# -- sampling


def test_sampling_options_reach_the_engine(client):
    def text(**options):
        return client.completions.create(model="tiny", prompt="a", max_tokens=12, **options).choices[0].text

    assert text(seed=3) == text(seed=3)
    assert len({text() for _ in range(4)}) > 1
    assert text(logit_bias={"65": 100}) == "A" * 12
    assert text(extra_body={"allowed_token_ids": [65]}) == "A" * 12
    assert text(temperature=0, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 3,
                                           "bad_words": ["zz"], "skip_special_tokens": False}) != ""
    assert "A" not in text(temperature=0, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"65": -100})


def test_n_samples_differ(client):
    """case 22"""
    answer = client.completions.create(model="tiny", prompt="a", n=4, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) > 1
