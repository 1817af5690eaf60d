"""/v1/chat/completions, through the openai client."""

from __future__ import annotations

import json

import openai
import pytest

from jaxserve import SamplingParams
from tests.llm import tiny
from tests.serving.http.conftest import serving

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
CHARACTERS = "\N{PARTY POPPER}z"


@pytest.fixture(scope="module")
def speaker(make_llm):
    """Answers every conversation with "fine.", and "a" with CHARACTERS."""
    answer = [ord(" "), *b"fine.", tiny.END_OF_TURN]
    with make_llm(params=tiny.parrot_tensors(answer, [ord("a"), *CHARACTERS.encode(), tiny.EOS])) as llm, \
            serving(llm) as server:
        yield server


def offline(llm, messages=MESSAGES, **params):
    continued = params.pop("continue_final_message", False)
    return llm.chat(messages, SamplingParams(**({"temperature": 0, "ignore_eos": True} | params)), use_tqdm=False,
                    continue_final_message=continued)[0]


def events(http, **body) -> list[str]:
    """The data of each event of a streamed answer, as text."""
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "max_tokens": 4} | body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_whole_and_streamed_equal_the_offline_result(server, client):
    expected = offline(server.llm, max_tokens=12)
    whole = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **GREEDY)
    assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion"
    message = whole.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", expected.text, None)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids) and whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(messages=MESSAGES, max_tokens=12, stream=True, **GREEDY))
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"] == [
        last.finish_reason]
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"


def test_the_stream_helper_of_the_client(speaker):
    with speaker.client() as client, client.chat.completions.stream(
            model="tiny", messages=MESSAGES, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == "fine."


def test_without_a_limit_it_takes_the_rest_of_the_context(client):
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.usage.total_tokens == 128


def test_the_newer_name_of_the_limit_counts(client):
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=9, max_completion_tokens=3, **GREEDY)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(("options", "count"), [
    (None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)])
def test_usage_in_a_stream_only_when_asked_for(http, options, count):
    """case 54"""
    received = events(http, **({} if options is None else {"stream_options": options}))
    assert received.pop() == "[DONE]" and "[DONE]" not in received
    chunks = [json.loads(event) for event in received]
    usages = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert len(usages) == count
    if count:
        assert usages == chunks[-1:] and usages[0]["choices"] == [] and usages[0]["usage"]["completion_tokens"] == 4
        assert all("usage" in chunk for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_one_role_and_one_finish_reason_per_choice(http, max_tokens):
    """case 55"""
    chunks = [json.loads(event) for event in events(http, n=2, max_tokens=max_tokens, ignore_eos=True)[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] and [c for c in mine if "role" in c["delta"]] == mine[:1]


@pytest.mark.parametrize(("max_tokens", "reason"), [(9, "stop"), (2, "length")])
def test_characters_stay_whole(speaker, max_tokens, reason):
    """cases 1, 3: the bytes of a character come one a token, and its end may be missing."""
    options = {"model": "tiny", "prompt": "a", "max_tokens": max_tokens, "temperature": 0}
    with speaker.client() as client:
        whole = client.completions.create(**options)
        texts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
    assert "".join(texts) == whole.choices[0].text
    assert whole.choices[0].finish_reason == reason
    if reason == "stop":
        assert whole.choices[0].text == CHARACTERS and set("".join(texts)) <= set(CHARACTERS)
    else:
        assert whole.usage.completion_tokens == 2


def test_logprobs(server, client):
    expected = offline(server.llm, max_tokens=5, logprobs=3).outputs[0]
    options = {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 3} | GREEDY
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [p[i].logprob for i, p in zip(expected.token_ids, expected.logprobs)]
    assert [bytes(entry.bytes) for entry in content] == [bytes([i]) for i in expected.token_ids]
    assert all([top.logprob for top in entry.top_logprobs] == sorted((top.logprob for top in entry.top_logprobs),
                                                                     reverse=True) for entry in content)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    chunks = client.chat.completions.create(stream=True, **options)
    streamed = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs
                for entry in choice.logprobs.content]
    assert streamed == content
    only = client.chat.completions.create(**(options | {"top_logprobs": None})).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in only] == [[]] * 5


def test_token_ids(server, client):
    expected = offline(server.llm, max_tokens=5)
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0,
               "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = client.chat.completions.create(**options)
    assert whole.prompt_token_ids == expected.prompt_token_ids
    assert whole.choices[0].token_ids == expected.outputs[0].token_ids
    chunks = list(client.chat.completions.create(stream=True, **options))
    assert chunks[0].prompt_token_ids == expected.prompt_token_ids
    assert [i for chunk in chunks for choice in chunk.choices for i in getattr(choice, "token_ids", None) or []] == \
        expected.outputs[0].token_ids


def test_continuing_the_last_message(server, client):
    """case 108"""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    expected = offline(server.llm, messages, max_tokens=4, continue_final_message=True)
    assert server.llm.tokenizer.decode(expected.prompt_token_ids).endswith("The answer is")
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0, extra_body={
        "continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True})
    assert answer.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(model="tiny", messages=messages, extra_body={
            "continue_final_message": True, "add_generation_prompt": True})


def test_content_as_parts(server, client):
    """case 52"""
    parts = [{"type": "text", "text": "Hi"}]
    answer = client.chat.completions.create(messages=[MESSAGES[0], {"role": "user", "content": parts}], max_tokens=5,
                                            **GREEDY)
    assert answer.choices[0].message.content == offline(server.llm, max_tokens=5).text


def test_templates_of_requests_need_trust(server, http):
    body = {"messages": MESSAGES, "max_tokens": 2, "chat_template": "{{ messages[1].content }}", "temperature": 0}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    with serving(server.llm, trust_request_chat_template=True) as trusting, trusting.http() as trusted:
        answer = trusted.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 2
