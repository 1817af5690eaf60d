"""Batch files: what a line may hold, and that lines do not disturb each other."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxserve import SamplingParams
from jaxserve.serving.batch import BatchRun, read_tasks
from jaxserve.serving.service import Service

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(make_llm):
    with make_llm(max_waiting_requests=8) as llm:
        yield llm


def line(custom_id, url="/v1/completions", /, method="POST", **body) -> bytes:
    body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {
        name: value for name, value in body.items() if value is not None}}).encode()


def answers(llm, lines) -> tuple[dict, BatchRun]:
    """Output lines by custom_id."""
    written: list[bytes] = []

    async def main() -> BatchRun:
        service = Service(model_name="tiny", max_waiting_tokens=None)
        await service.start(llm)
        batch = BatchRun(service, written.append)
        await batch.run(read_tasks(lines))
        assert service.num_active == 0
        service.close()
        return batch

    batch = asyncio.run(main())
    assert all(text.endswith(b"\n") and text.count(b"\n") == 1 for text in written)
    records = [json.loads(text) for text in written]
    assert all(set(record) == {"id", "custom_id", "response", "error"} for record in records)
    assert len({record["id"] for record in records}) == len(records)
    return {record["custom_id"]: record for record in records}, batch


def test_each_endpoint_answers_as_over_http(llm):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected, = llm.generate(["Hello"], params, use_tqdm=False)
    chat, = llm.chat([MESSAGES], params, use_tqdm=False)
    found, batch = answers(llm, [
        line("a"), line("b", "/v1/chat/completions", messages=MESSAGES, prompt=None),
        line("c", "/v1/responses", input="Hi", max_output_tokens=4, max_tokens=None, prompt=None)])
    assert all(record["response"]["status_code"] == 200 and record["error"] is None for record in found.values())
    bodies = {name: record["response"]["body"] for name, record in found.items()}
    assert bodies["a"]["choices"][0]["text"] == expected.outputs[0].text
    assert bodies["b"]["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert bodies["c"]["output"][0]["content"][0]["text"] == chat.outputs[0].text
    assert bodies["a"]["id"] == f"cmpl-{found['a']['response']['request_id']}"
    assert (batch.num_failed, batch.num_tokens) == (0, 12)


@pytest.mark.parametrize(("bad", "code"), [
    (b"{", "invalid_json_line"), (b"\xff\xfe{", "invalid_json_line"), (b"[]", "invalid_json_line"),
    (b"{}", "missing_required_parameter"), (b'{"custom_id": 5}', "missing_required_parameter"),
    (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "missing_required_parameter"),
    (line("x", method="GET"), "invalid_method"), (line("x", "/v1/embeddings"), "invalid_url"),
    (line("x")[:-1] + b', "more": 1}', "invalid_request"),
])
def test_lines_that_are_no_requests(bad, code):
    before, wrong, after = read_tasks([line("a"), bad, line("b")])
    assert wrong.error is not None and wrong.error.code == code and "line 2" in str(wrong.error)
    assert before.error is after.error is None


def test_bad_lines_stop_no_others(llm):
    found, batch = answers(llm, [
        b"nonsense\n", line("long", prompt="x" * 500), line("field", nonsense=1), line("stream", stream=True),
        line("model", model="gpt"), b"\n", line("good"), line("body")[:-1].replace(b'"body": {', b'"body": [{')[:-1]
        + b"}]}"])
    assert found[None]["response"] is None and found[None]["error"]["code"] == "invalid_json_line"
    statuses = {name: record["response"]["status_code"] for name, record in found.items() if name is not None}
    assert statuses == {"long": 400, "field": 400, "stream": 400, "model": 404, "good": 200, "body": 400}
    assert found["field"]["response"]["body"]["error"]["param"] == "nonsense" and found["field"]["error"] is None
    assert batch.num_failed == 6


def test_a_custom_id_that_is_no_text_is_repeated(llm):
    task, = read_tasks([b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}'])
    assert (task.custom_id, task.error.code) == (5, "missing_required_parameter") and "got 5" in str(task.error)


def test_of_equal_custom_ids_the_first_counts(llm):
    tasks = read_tasks([line("a", max_tokens=1), line("b"), line("a", max_tokens=2)])
    assert [task.error and task.error.code for task in tasks] == [None, None, "duplicate_custom_id"]
    assert tasks[2].custom_id == "a"


def test_more_than_the_queue_holds(llm):
    """Eight sequences may wait, three run."""
    found, batch = answers(llm, [line(str(i), n=4) for i in range(12)]
                           + [line(f"prompts {i}", prompt=["Hello"] * 2, n=4) for i in range(4)])
    assert len(found) == 16 and batch.num_failed == 0 and batch.num_tokens == 20 * 4 * 4
    assert len({record["response"]["body"]["choices"][0]["text"] for record in found.values()}) == 1
    found, batch = answers(llm, [line("n", n=9), line("prompts", prompt=["Hello"] * 9)])
    assert all(record["response"]["status_code"] == 400 for record in found.values()), "these could never wait"
