"""/v1/responses, through the openai client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from jaxserve import SamplingParams
from tests.llm import tiny
from tests.serving.http.conftest import serving

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
INPUT = [{"role": "user", "content": "Hi"}]


def offline(llm, messages=INPUT, **params):
    return llm.chat(messages, SamplingParams(**({"temperature": 0, "ignore_eos": True} | params)), use_tqdm=False)[0]


@pytest.fixture(scope="module")
def speaker(make_llm):
    """Answers every conversation with "fine."."""
    answer = [ord(" "), *b"fine.", tiny.END_OF_TURN]
    with make_llm(params=tiny.parrot_tensors(answer)) as llm, serving(llm) as server:
        yield server


def test_a_whole_answer_equals_the_offline_result(server, client):
    expected = offline(server.llm, max_tokens=9)
    answer = client.responses.create(input="Hi", max_output_tokens=9, metadata={"a": "b"}, **GREEDY)
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == "tiny"
    assert answer.output_text == expected.outputs[0].text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    item, = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert item.id.startswith("msg_")
    assert (answer.metadata, answer.max_output_tokens, answer.temperature, answer.top_p) == ({"a": "b"}, 9, 0, 1)
    assert (answer.store, answer.tools, answer.error) == (False, [], None)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(expected.prompt_token_ids), 9)
    assert usage.total_tokens == usage.input_tokens + 9 and usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_ends_by_itself_is_complete(speaker):
    with speaker.client() as client:
        answer = client.responses.create(model="tiny", input="Hi", temperature=0)
    assert (answer.output_text, answer.status, answer.incomplete_details) == ("fine.", "completed", None)
    assert answer.output[0].status == "completed" and answer.completed_at >= answer.created_at


@pytest.mark.parametrize(("items", "instructions", "messages"), [
    ("Hi", "Be short.", [{"role": "system", "content": "Be short."}, *INPUT]),
    ([{"role": "developer", "content": "Be short."}, {"role": "user", "content": [
        {"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]}], None,
     [{"role": "system", "content": "Be short."}, {"role": "user", "content": "H\ni"}]),
    ([{"type": "message", "role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
      {"role": "user", "content": "Hi"}], None, [*INPUT, {"role": "assistant", "content": "Yes?"}, *INPUT]),
])
def test_inputs_are_conversations(server, client, items, instructions, messages):
    answer = client.responses.create(input=items, instructions=instructions, max_output_tokens=6, **GREEDY)
    assert answer.output_text == offline(server.llm, messages, max_tokens=6).outputs[0].text
    assert answer.instructions == instructions


def test_an_answer_can_be_sent_back_as_input(server, client):
    first = client.responses.create(input=INPUT, max_output_tokens=4, **GREEDY)
    messages = [*INPUT, {"role": "assistant", "content": first.output_text}, *INPUT]
    dumped = [item.model_dump(exclude_none=True) for item in first.output]
    for history in (first.output, dumped):
        second = client.responses.create(input=[*INPUT, *history, *INPUT], max_output_tokens=4, **GREEDY)
        assert second.output_text == offline(server.llm, messages, max_tokens=4).outputs[0].text


def test_cached_tokens_are_in_the_usage(client):
    options = {"model": "tiny", "input": "a long question, longer than a page", "max_output_tokens": 1,
               "extra_body": {"cache_salt": "responses"}}
    cached = [client.responses.create(**options).usage.input_tokens_details.cached_tokens for _ in range(2)]
    assert cached[0] == 0 and cached[1] >= 8


def test_the_events_of_a_stream(server, client):
    expected = offline(server.llm, max_tokens=9).outputs[0].text
    events = list(client.responses.create(input="Hi", max_output_tokens=9, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas and [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas), "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete"]
    assert "".join(event.delta for event in deltas) == expected
    text_done, part_done, item_done, last = events[-4:]
    assert text_done.text == part_done.part.text == item_done.item.content[0].text == last.response.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert len({event.item_id for event in deltas} | {item_done.item.id, events[2].item.id}) == 1
    assert last.response.usage.output_tokens == 9 and last.response.id == events[0].response.id


def test_the_wire_format_of_events(http):
    answer = http.post("/v1/responses", json={"input": "Hi", "stream": True, "max_output_tokens": 2})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("event: response.") for block in blocks)
    assert all(len(block.split("\n")) == 2 for block in blocks) and "[DONE]" not in answer.text


def test_the_stream_helper_of_the_client(speaker):
    with speaker.client() as client, client.responses.stream(model="tiny", input="Hi", temperature=0) as stream:
        seen = [event.type for event in stream]
        assert stream.get_final_response().output_text == "fine." and seen[-1] == "response.completed"


def test_async_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(input="Hi", max_output_tokens=8, **GREEDY)
            stream = await client.responses.create(input="Hi", max_output_tokens=8, stream=True, **GREEDY)
            return whole.output_text, "".join([event.delta async for event in stream
                                               if event.type == "response.output_text.delta"])

    whole, streamed = asyncio.run(main())
    assert whole == streamed == offline(server.llm, max_tokens=8).outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, client, stream):
    expected = offline(server.llm, max_tokens=4, logprobs=2).outputs[0]
    answer = client.responses.create(input="Hi", max_output_tokens=4, include=["message.output_text.logprobs"],
                                     top_logprobs=2, stream=stream, **GREEDY)
    if stream:
        events = list(answer)
        streamed = [entry.logprob for event in events if event.type == "response.output_text.delta"
                    for entry in event.logprobs]
        answer = events[-1].response
    entries = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [
        position[token].logprob for token, position in zip(expected.token_ids, expected.logprobs)]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    if stream:
        assert streamed == [entry.logprob for entry in entries]


@pytest.mark.parametrize("body", [
    {"input": [], "instructions": "x"}, {"input": 5}, {"input": [5]},
    {"input": [{"role": "user"}]}, {"input": [{"role": "wizard", "content": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
    {"input": [{"role": "user", "content": "x", "weight": 1}]}, {"input": "x" * 1280},
    {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"store": True}, {"background": True},
    {"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"truncation": "auto"},
    {"text": {"format": {"type": "json_object"}}}, {"text": {"verbosity": "low"}}, {"text": 5},
    {"reasoning": {"effort": "high"}}, {"reasoning": {"summary": "auto"}}, {"include": ["file_search_call.results"]},
    {"top_logprobs": 2}, {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, {"n": 2},
    {"max_output_tokens": 0}, {"max_tokens": 5}, {"max_output_tokens": 10**6}, {"messages": []},
    {"metadata": {"a": 1}}, {"metadata": {"a" * 65: "b"}}, {"temperature": 1e9},
])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(http, body, stream):
    body = {"input": "Hi", "stream": stream} | body
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("field", "value"), [("top_logprobs", 21), ("max_output_tokens", 10**6)])
def test_refusals_name_the_field_that_was_sent(http, field, value):
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], field: value}
    error = http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field} is {value}")


def test_more_refusals(http):
    assert http.post("/v1/responses", json={"input": "Hi", "stream_options": {}}).status_code == 400
    for body in (b"{}", b'{"input": null}', b'{"instructions": "x"}', b'{"input": ["\\ud800"]}'):
        answer = http.post("/v1/responses", content=body)
        assert answer.status_code == 400 and "input" in answer.json()["error"]["param"]
    assert http.post("/v1/responses", content=b'{"input": "\\ud800"}').status_code == 400  # case 53


@pytest.mark.parametrize("extra", [
    {"store": False}, {"user": "me"}, {"safety_identifier": "x"}, {"parallel_tool_calls": True}, {"tools": []},
    {"service_tier": "auto"}, {"truncation": "disabled"}, {"text": {"format": {"type": "text"}}}, {"reasoning": {}},
    {"reasoning": {"effort": "none"}}, {"include": ["reasoning.encrypted_content"]}, {"prompt_cache_key": "x"},
    {"top_k": 5, "seed": 1, "stop": ["x"]}, {"input": [{"role": "assistant", "content": "x", "phase": "commentary"}]}])
def test_fields_that_ask_for_nothing_unusual(http, extra):
    answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1} | extra)
    assert answer.status_code == 200, answer.text


def test_nothing_is_stored(client):
    answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=1)
    for later in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            later(answer.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="tiny", input="Hi", previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt", input="Hi")
