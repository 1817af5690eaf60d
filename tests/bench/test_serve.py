"""Driving a server: when requests are sent, what is read of the answers, and what goes wrong. Time is virtual."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from click.testing import CliRunner

from jaxserve.bench.serve import Closed, Poisson, drive
from jaxserve.bench.serve_load import Turn
from jaxserve.bench.serve_metrics import Chunk, Exchange, measure
from jaxserve.bench.serve_targets import OpenAITarget, read_answer
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError
from tests.bench import virtual_time


class FakeServer:
    """Answers after `prefill` seconds with a token, and one every `step` seconds then. `slots` requests at a time."""

    name, kind = "fake", "ids"

    def __init__(self, *, prefill=0.5, step=0.1, slots=1000, stall=(0.0, 0.0), token_ids=True):
        self.prefill, self.step, self.stall, self.token_ids = prefill, step, stall, token_ids
        self.slots = asyncio.Semaphore(slots)
        self.prompts: list[tuple[float, list[int]]] = []
        self.running = self.most = self.cancelled = 0

    async def send(self, prompt, max_tokens, exchange):
        clock = asyncio.get_running_loop().time
        exchange.sent = clock()
        self.prompts.append((clock(), prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.slots:
                if self.stall[0] <= clock() < self.stall[1]:
                    await asyncio.sleep(self.stall[1] - clock())
                await asyncio.sleep(self.prefill)
                for number in range(max_tokens):
                    exchange.chunks.append(Chunk(clock(), 1))
                    if self.token_ids:
                        exchange.token_ids = (exchange.token_ids or []) + [100 + number]
                    if number < max_tokens - 1:
                        await asyncio.sleep(self.step)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def conversations(count, turns=1, max_tokens=3):
    return [[Turn([number], max_tokens)] * turns for number in range(count)]


def test_latencies_of_a_known_server():
    run = measure(virtual_time.run(drive(FakeServer(), conversations(4), Closed(2))))
    assert run.ttft.mean == pytest.approx(0.5) and run.tpot.mean == pytest.approx(0.1)
    assert run.itl.percentiles[99] == pytest.approx(0.1) and run.e2e.max == pytest.approx(0.7)
    assert run.duration == pytest.approx(1.4) and run.output_tokens_per_second == pytest.approx(12 / 1.4)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_a_closed_loop_keeps_its_number(concurrency):
    server = FakeServer()
    exchanges = virtual_time.run(drive(server, conversations(12), Closed(concurrency)))
    assert server.most == min(concurrency, 12) and len(exchanges) == 12
    assert sorted(prompt for _, (prompt,) in server.prompts) == list(range(12))
    assert all(exchange.sent == exchange.scheduled for exchange in exchanges)


def test_an_open_loop_waits_for_nobody():
    """However slow the server is, requests come as they would."""
    fast, slow = FakeServer(prefill=0.01), FakeServer(prefill=60.0)
    for server in (fast, slow):
        virtual_time.run(drive(server, conversations(50), Poisson(5.0), seed=3))
    assert [at for at, _ in fast.prompts] == pytest.approx([at for at, _ in slow.prompts])
    assert slow.most == 50


def test_a_stall_is_charged_to_all_who_came_meanwhile():
    exchanges = virtual_time.run(drive(FakeServer(stall=(1.0, 11.0), slots=1, step=0.0, prefill=0.0),
                                       conversations(60, max_tokens=1), Poisson(5.0), seed=1))
    waited = [exchange for exchange in exchanges if 1.0 <= exchange.scheduled < 11.0]
    assert len(waited) > 30
    for exchange in waited:
        assert exchange.ttft >= 11.0 - exchange.scheduled - 1e-9


def test_turns_go_on_from_the_answers():
    server = FakeServer()
    first, second, third, other, *_ = virtual_time.run(drive(server, conversations(2, turns=3, max_tokens=2), Closed(1),
                                                             think_time=5.0))
    assert [prompt for _, prompt in server.prompts[:3]] == [[0], [0, 100, 101, 0], [0, 100, 101, 0, 100, 101, 0]]
    assert other.sent == third.chunks[-1].at  # nobody thinks after the last answer
    assert second.scheduled == pytest.approx(first.chunks[-1].at + 5.0) == pytest.approx(second.sent)
    assert third.ttft == pytest.approx(0.5)


def test_turns_of_ids_need_the_ids_of_the_answers():
    with pytest.raises(ConfigError, match="--api chat"):
        virtual_time.run(drive(FakeServer(token_ids=False), conversations(1, turns=2), Closed(1)))


def test_a_timeout_ends_the_request_and_its_conversation():
    server = FakeServer(prefill=0.5, step=1.0)
    exchanges = virtual_time.run(drive(server, conversations(3, turns=2), Closed(3), timeout=2.0))
    assert [exchange.error for exchange in exchanges] == ["timeout"] * 3
    assert server.cancelled == 3 and server.running == 0
    assert measure(exchanges).errors == {"timeout": 3}


# -- answers

def event(text="", ids=None, **fields) -> bytes:
    choice = {"index": 0, "text": text} | ({} if ids is None else {"token_ids": ids})
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


USAGE = (b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, '
         b'"prompt_tokens_details": null}}\n\n')
DONE = b"data: [DONE]\n\n"


def read(*script: bytes | float) -> Exchange:
    """Reads an answer whose body comes like this; numbers are seconds of waiting."""
    async def blocks():
        for item in script:
            if isinstance(item, bytes):
                yield item
            else:
                await asyncio.sleep(item)

    exchange = Exchange(scheduled=0.0)
    virtual_time.run(read_answer(blocks(), exchange))
    return exchange


def test_an_answer_with_ids():
    answer = read(1.0, event("a", [5]), 0.5, event("", [6, 7]) + event("bc", [8]), 0.5, USAGE, DONE)
    assert answer.chunks == [Chunk(1.0, 1), Chunk(1.5, 3)]
    assert (answer.text, answer.token_ids, answer.error) == ("abc", [5, 6, 7, 8], None)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 4, None)


def test_an_answer_of_a_server_that_tells_no_ids():
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
    delta = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\r\n\r\n'
    thought = b'data:{"choices":[{"delta":{"reasoning_content":"Hm"}}]}\n\n'
    last = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    answer = read(b": a comment\n\n", role, 1.0, thought, 1.0, delta, 1.0, last, USAGE, DONE)
    assert answer.chunks == [Chunk(1.0, None), Chunk(2.0, None)]  # neither the role nor the end is a token
    assert answer.num_tokens == 4 and answer.text == "HmHi"


def test_blocks_may_be_cut_anywhere():
    whole = event("a\N{PARTY POPPER}", [5, 6]) + event("b", [7]) + USAGE + DONE
    for size in (1, 2, 3, 7, 64):
        answer = read(*(whole[i:i + size] for i in range(0, len(whole), size)))
        assert (answer.text, answer.token_ids, answer.error) == ("a\N{PARTY POPPER}b", [5, 6, 7], None)


@pytest.mark.parametrize(("script", "error"), [
    ([event("a", [1])], "ended early"), ([], "ended early"), ([event("a", [1]), b"data: {\n\n"], "not JSON"),
    ([event("a", [1]), b'data: {"error": {"message": "no"}}\n\n', DONE], "error in the stream")])
def test_broken_answers(script, error):
    assert read(*script).error == error


# -- a scripted endpoint

@contextlib.asynccontextmanager
async def endpoint(*answers: bytes, owner="somebody"):
    """Gives one answer to each POST, then closes the connection; yields its URL and the requests it got."""
    requests: list[tuple[bytes, dict]] = []
    waiting = list(answers)

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        else:
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            requests.append((head, json.loads(await reader.readexactly(size))))
            writer.write(waiting.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


def stream(*events: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + b"".join(events)


def ask(*answers: bytes, owner="somebody", **options):
    """One request for each answer; returns the exchanges and the requests that arrived."""
    async def run():
        async with endpoint(*answers, owner=owner) as (url, requests), OpenAITarget(url, **options) as target:
            exchanges = [Exchange(0.0) for _ in answers]
            for exchange in exchanges:
                await target.send([{"role": "user", "content": "Hi"}] if target.kind == "messages" else [1, 2], 4,
                                  exchange)
            return exchanges, requests

    return asyncio.run(run())


def test_requests_that_fail():
    cut = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n" + event("a", [1])
    busy = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    exchanges, _ = ask(stream(event("a", [1]), DONE), busy, cut, b"", stream(event("a", [1])))
    assert [exchange.error for exchange in exchanges] == [
        None, "HTTP 429", "connection lost", "connection lost", "ended early"]


def test_a_request_as_it_is_sent():
    _, ((head, body),) = ask(stream(DONE), api_key="secret", sampling={"temperature": 0.5, "top_k": 3})
    assert b"Authorization: Bearer secret\r\n" in head and b"POST /v1/completions " in head
    assert body == {"model": "m", "prompt": [1, 2], "max_tokens": 4, "stream": True, "temperature": 0.5, "top_k": 3,
                    "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("owner", ["jaxserve", "vllm"])
def test_servers_that_know_our_fields_get_them(owner):
    _, ((head, body),) = ask(stream(DONE), owner=owner, kind="messages")
    assert b"POST /v1/chat/completions " in head and body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["ignore_eos"] is True and body["return_token_ids"] is True
    _, ((_, body),) = ask(stream(DONE), owner=owner, our_fields=False)
    assert "ignore_eos" not in body


def test_no_server():
    async def run(**options):
        async with endpoint() as (url, _):
            pass
        async with OpenAITarget(url, **options) as target:
            exchange = Exchange(0.0)
            await target.send([1], 1, exchange)
            return exchange.error

    assert asyncio.run(run(model="m")) == "cannot connect"
    with pytest.raises(ConfigError, match="names no model"):
        asyncio.run(run())


# -- the command

@pytest.mark.parametrize(("args", "message"), [
    ([], "either --url or --grpc"), (["--url", "http://x", "--grpc", "x:1"], "either --url or --grpc"),
    (["--url", "http://x", "--request-rate", "1", "--concurrency", "2"], "give one of them"),
    (["--url", "http://x", "--input-tokens", "9-3"], "range such as"), (["--url", "http://x", "--slo", "a"], "ttft="),
    (["--url", "http://x", "--sampling", "[]"], "no JSON object"),
    (["--url", "http://x", "--sampling", "{"], "no JSON object")])
def test_wrong_options(args, message):
    result = CliRunner().invoke(main, ["bench", "serve", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
