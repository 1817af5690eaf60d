"""Clients that leave, read slowly or not at all, engines that fail: the others do not notice."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest

from jaxserve import RequestError, SamplingParams
from jaxserve.serving.service import State
from tests.llm import tiny
from tests.serving.http.conftest import TIMEOUT, Server, serving

STREAM = {"temperature": 0, "ignore_eos": True, "stream": True}


def solo(llm, prompt: list[int], max_tokens: int) -> str:
    return llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens),
                        use_tqdm=False)[0].text


async def idle(server: Server) -> None:
    """Waits until the engine has let go of everything, which is within a step of the last client's leaving."""
    while server.service.num_active or server.service.num_waiting:
        await asyncio.to_thread(server.llm.call_soon, lambda: None)
        await asyncio.sleep(0)


def assert_nothing_is_held(server: Server) -> None:
    server.call(asyncio.wait_for(idle(server), TIMEOUT))
    numbers = server.llm.metrics()
    assert (numbers["running"], numbers["waiting"]) == (0, 0)
    assert numbers["pages_free"] == numbers["pages_total"]


def test_a_third_of_thirty_clients_leaves(server):
    """cases 73, 74"""
    prompts = [tiny.prompt_ids(5 + i % 20, seed=i) for i in range(30)]
    leaving = {i: 1 + i % 7 for i in range(0, 30, 3)}  # after so many events

    async def read(client: httpx.AsyncClient, i: int) -> str | None:
        body = STREAM | {"prompt": prompts[i], "max_tokens": 20}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            number = 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                number += 1
                if number == leaving.get(i):
                    return None
                if line != "data: [DONE]":
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    async def main() -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
            return await asyncio.gather(*(read(client, i) for i in range(30)))

    texts = asyncio.run(main())
    assert_nothing_is_held(server)
    assert all(i in leaving for i, text in enumerate(texts) if text is None)
    assert texts.count(None) > 3  # one that was slow got all in fewer events
    for prompt, text in zip(prompts, texts, strict=True):
        assert text is None or text == solo(server.llm, prompt, 20)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_before_an_answer_that_is_not_streamed(server, path):
    body = {"max_tokens": 100, "n": 3, "ignore_eos": True}
    body |= {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    content = json.dumps(body).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                               % (path.encode(), len(content), content))
            while not server.service.num_active:
                pass
        assert_nothing_is_held(server)


def test_leaving_with_a_second_request_on_the_way(server, http):
    body = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True}).encode()
    go_on = threading.Event()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                               % (len(body), body))
            while not server.service.num_active:
                pass
            (stream,) = server.service._streams.values()
            while not stream.begun:
                pass
            server.llm.call_soon(lambda: go_on.wait() and None)  # the request cannot end by itself
            http.get("/health")  # now it is awaited that the client leaves
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            http.get("/health")
        deadline = time.monotonic() + 60
        while stream.abort_cause is None and time.monotonic() < deadline:
            http.get("/health")
        assert stream.abort_cause == "client"
    finally:
        go_on.set()
    assert_nothing_is_held(server)


def test_a_reader_that_never_reads_stops_nobody(server, http):
    body = json.dumps(STREAM | {"prompt": "a", "max_tokens": 100, "n": 2, "logprobs": 20}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
        while not server.service.num_active:
            pass
        assert http.post("/v1/completions", json={"prompt": "b", "max_tokens": 3}).status_code == 200
        assert_nothing_is_held(server)  # its generation has ended all the same


def test_random_cancellations(server):
    """cases 74: leaving at any moment, also before the request has reached the engine."""
    rng = random.Random(7)

    async def one(client: httpx.AsyncClient, i: int) -> None:
        task = asyncio.ensure_future(client.post("/v1/completions", json={
            "prompt": tiny.prompt_ids(8, seed=i), "max_tokens": 10, "n": 1 + i % 3, "stream": bool(i % 2)}))
        await asyncio.wait({task}, timeout=rng.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            await asyncio.gather(*(one(client, i) for i in range(40)))

    asyncio.run(main())
    assert_nothing_is_held(server)


def test_a_fault_within_a_stream_is_an_event(make_llm, monkeypatch):
    """case 56"""
    with make_llm() as llm, serving(llm) as server, server.client() as client, server.http() as http:
        launch, after = llm._runner.launch, 0

        def fails(plan):
            if plan.decodes and plan.decodes[0].seq.num_known >= plan.decodes[0].seq.prompt_len + after:
                raise RuntimeError("the device is on fire")
            return launch(plan)

        after = 4
        monkeypatch.setattr(llm._runner, "launch", fails)
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=20, temperature=0, stream=True,
                                           extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError, match="the device is on fire|the engine failed"):
            list(stream)
        lines = http.post("/v1/completions", json=STREAM | {"prompt": "a", "max_tokens": 20}).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-2:] == ["data: [DONE]", ""] and "choices" in lines[0]
        answer = http.post("/v1/completions", json=STREAM | {"prompt": "a", "max_tokens": 20, "stream": False})
        assert answer.status_code == 500 and "Traceback" not in answer.text
        *events, failed = client.responses.create(model="tiny", input="a", temperature=0, stream=True,
                                                  extra_body={"ignore_eos": True})
        assert failed.type == "response.failed" and "the engine failed" in failed.response.error.message
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert failed.response.output_text == said != ""
        monkeypatch.setattr(llm._runner, "launch", launch)
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert_nothing_is_held(server)


def test_a_fault_of_the_client_within_a_generation_is_called_so(server, client, http, monkeypatch):
    """A mask that leaves nothing, say: it shows where that place is reached."""
    core, step, steps = server.llm._core, server.llm._core.step, collections.Counter()

    def step_and_refuse():
        step()
        for request in list(core._requests.values()):
            steps[request] += 1
            if steps[request] == 6:
                core._fail(request, RequestError("bad_words leaves no token to choose", "bad_words"))

    def counts() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines
                if "rejections_total" in name or "success_total" in name and "error" in name}

    before = counts()
    with monkeypatch.context() as faulty:
        faulty.setattr(core, "step", step_and_refuse)
        body = STREAM | {"prompt": "a", "max_tokens": 20}
        answer = http.post("/v1/completions", json=body | {"stream": False})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words"
        *_, text, failure, done, _ = http.post("/v1/completions", json=body).text.split("\n\n")
        assert json.loads(text.removeprefix("data: "))["choices"] and done == "data: [DONE]"
        assert json.loads(failure.removeprefix("data: ")) == answer.json()
        *_, failed = client.responses.create(model="tiny", input="a", temperature=0, stream=True,
                                             extra_body={"ignore_eos": True})
        assert (failed.type, failed.response.error.code) == ("response.failed", "invalid_prompt")
    assert_nothing_is_held(server)
    after = counts()
    assert sum(after.values()) - sum(before.values()) == 3
    assert {name.partition("reason=")[2] for name in after if after[name] != before.get(name, 0)} == {'"invalid"}'}


def test_draining(make_llm):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json=STREAM | {"prompt": "a", "max_tokens": 60}) as answer:
            lines = answer.iter_lines()
            next(lines)
            draining = asyncio.run_coroutine_threadsafe(server.service.drain(TIMEOUT), server.loop)
            while server.service.state is not State.DRAINING:
                pass
            with server.http() as other:
                assert other.get("/health").status_code == 503
                refused = other.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503 and refused.headers["retry-after"]
            rest = list(lines)
        assert draining.result(TIMEOUT) and rest[-2] == "data: [DONE]"
        assert "length" in rest[-4] and server.service.num_active == 0


def test_draining_ends_streams_with_an_error_when_its_time_is_over(make_llm):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json=STREAM | {"prompt": "a", "max_tokens": 120}) as answer:
            lines = answer.iter_lines()
            next(lines)
            aborted = not server.call(server.service.drain(0))
            text = "\n".join(lines)
        assert text.rstrip().endswith("data: [DONE]")
        assert ('"code":"unavailable"' in text) == aborted


def test_an_engine_that_ends_turns_health_red(make_llm, monkeypatch):
    with make_llm() as llm, serving(llm) as server, server.http() as http:
        def broken():
            raise SystemError("a bug of ours")

        monkeypatch.setattr(llm._core, "step", broken)
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 500
        while server.service.state is not State.FAILED:
            pass
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/metrics").status_code == 200
