"""200 streams at once on a real model, over every protocol, of which a third leaves: nobody else notices.

Whose company a request computes in must not change its text, so the engine runs with `deterministic`: then survivors'
texts are compared with solo runs letter by letter. Without it rounding differs with the shapes of steps, and where two
tokens are nearly equal another one may win.
"""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest

from jaxserve.client import AsyncClient
from tests.drills.process import ServerProcess, server_process

pytestmark = pytest.mark.slow

STREAMS = 200
TOKENS = 24
KINDS = ("completion", "chat", "grpc")
SUBJECTS = ("the sea", "bread", "a long winter", "the steam engine", "a lost key", "rain", "the moon", "an old clock",
            "a mountain village", "salt", "a letter", "the first train")
FORMS = ("Write one sentence about {}.", "Tell a short story of {}", "Why do people like {}?", "A poem: {}",
         "Explain {} to a child.", "What is strange about {}?")


def prompt(i: int) -> str:
    return f"{i}. " + FORMS[i % len(FORMS)].format(SUBJECTS[i // len(FORMS) % len(SUBJECTS)])


class Crowd:
    """Asks the same questions in company and alone."""

    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession, grpc: AsyncClient):
        self._server, self._session, self._grpc = server, session, grpc
        self.left = 0  # before the end of their answer

    async def ask(self, i: int, leave_after: int | None = None) -> str | None:
        """The text; None if it left after so many pieces."""
        pieces = self._grpc_pieces(i) if KINDS[i % 3] == "grpc" else self._http_pieces(i, KINDS[i % 3])
        texts: list[str] = []
        try:
            async for piece in pieces:
                texts.append(piece)
                if len(texts) == leave_after:
                    self.left += 1
                    return None
        finally:
            await pieces.aclose()
        return "".join(texts)

    async def _http_pieces(self, i: int, kind: str):
        body = {"max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
        if kind == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt(i)}]
        else:
            path, body["prompt"] = "/v1/completions", prompt(i)
        answer = await self._session.post(self._server.url + path, json=body)
        try:
            assert answer.status == 200, await answer.text()
            reasons, ended = [], False
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                elif data:
                    choice, = json.loads(data)["choices"]
                    reasons.append(choice["finish_reason"])
                    yield choice["text"] if kind == "completion" else choice["delta"].get("content", "")
            assert ended and [reason for reason in reasons if reason] == ["length"]
        finally:
            answer.close()  # and not back to the pool: the server sees the connection end

    async def _grpc_pieces(self, i: int):
        async for event in self._grpc.stream(prompt(i), temperature=0, max_tokens=TOKENS, ignore_eos=True):
            yield event.text


def test_two_hundred_streams(xla_cache):
    rng = random.Random(4)
    leaving = {i: rng.randrange(1, TOKENS) for i in rng.sample(range(STREAMS), STREAMS // 3)}
    solo = rng.sample([i for i in range(STREAMS) if i not in leaving], 12)

    async def run(server: ServerProcess) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                         timeout=aiohttp.ClientTimeout(total=None)) as session, \
                AsyncClient(server.target) as grpc:
            crowd = Crowd(server, session, grpc)
            texts = await asyncio.gather(*(crowd.ask(i, leaving.get(i)) for i in range(STREAMS)))
            left = crowd.left
            await asyncio.to_thread(server.assert_nothing_is_held, pages)
            assert {i for i, text in enumerate(texts) if text is None} <= leaving.keys() and left > STREAMS // 6
            alone = [await crowd.ask(i) for i in solo]
        assert [texts[i] for i in solo] == alone
        assert all(text for i, text in enumerate(texts) if i not in leaving)
        numbers = await asyncio.to_thread(server.metrics)
        assert 0 < numbers["jaxserve:aborts_total{cause=client}"] <= left
        assert numbers["vllm:request_success_total{finished_reason=length}"] >= STREAMS - left + len(solo)
        assert numbers["jaxserve:compilations_total"] == 0

    with server_process("demo", deterministic=True, max_model_len=1024, compilation_cache_dir=xla_cache) as server:
        pages = server.metrics()["jaxserve:pages_free"]
        asyncio.run(run(server))
        server.assert_nothing_is_held(pages)
