"""An hour of a busy day in fast motion: tens of thousands of tiny requests of every kind on a tiny model. Memory,
pages, open files and threads stay what they were after the first of them, and nothing is compiled."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from jaxserve.client import AsyncClient
from jaxserve.errors import JaxserveError
from tests.drills.process import ServerProcess, server_process
from tests.llm import tiny

pytestmark = pytest.mark.slow

REQUESTS = 20_000
WARM_UP = 4_000  # allocators, caches and pools have got their size by then
CLIENTS = 16
# An object of a few hundred bytes that is kept for each request would show.
MOST_GROWTH = 12 << 20


class Day:
    """Random requests: whole and streamed, chats, several completions, refused ones, and clients that leave."""

    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession, grpc: AsyncClient, seed: int):
        self._server, self._session, self._grpc = server, session, grpc
        self._rng = random.Random(seed)

    async def one(self) -> None:
        prompt = self._rng.choices(range(97, 123), k=self._rng.randint(1, 24))
        options = {"max_tokens": self._rng.randint(1, 4), "temperature": self._rng.choice((0, 1.0)),
                   "ignore_eos": True}
        await self._rng.choices((self._whole, self._streamed, self._chat, self._refused, self._leaving, self._grpc_one,
                                 self._grpc_leaving), (8, 4, 2, 1, 1, 4, 1))[0](prompt, options)

    async def _post(self, path: str, body: dict, status: int = 200) -> bytes:
        async with self._session.post(self._server.url + path, json=body) as answer:
            content = await answer.read()
            assert answer.status == status, content
            return content

    async def _whole(self, prompt, options):
        await self._post("/v1/completions", {"prompt": prompt, "n": self._rng.choice((1, 1, 2)), **options})

    async def _streamed(self, prompt, options):
        extra = {"logprobs": 2} if self._rng.random() < 0.3 else {"stop": ["zz"]}
        content = await self._post("/v1/completions", {"prompt": prompt, "stream": True, **extra, **options})
        assert content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content

    async def _chat(self, prompt, options):
        await self._post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": bytes(prompt).decode()}], **options})

    async def _refused(self, prompt, options):
        await self._post("/v1/completions", {"prompt": prompt, **options, "max_tokens": 1000}, 400)

    async def _leaving(self, prompt, options):
        answer = await self._session.post(self._server.url + "/v1/completions", json={
            "prompt": prompt, "stream": True, **options, "max_tokens": 60})
        await answer.content.readany()
        answer.close()

    async def _grpc_one(self, prompt, options):
        async for _ in self._grpc.stream(prompt, **options):
            pass

    async def _grpc_leaving(self, prompt, options):
        stream = self._grpc.stream(prompt, **(options | {"max_tokens": 60}))
        await anext(stream)
        await stream.aclose()
        try:
            await self._grpc.generate(prompt, max_tokens=1000)
        except JaxserveError:
            return
        raise AssertionError("a request that is too long was taken")


async def live(server: ServerProcess, count: int, seed: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session, \
            AsyncClient(server.target) as grpc:
        day, left = Day(server, session, grpc, seed), iter(range(count))

        async def client() -> None:
            for _ in left:
                await day.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())


def test_a_long_day(tiny_files, xla_cache):
    options = tiny.ENGINE | {"max_num_seqs": 16, "num_pages": 60}
    with server_process(tiny_files, **options, compilation_cache_dir=xla_cache) as server:
        asyncio.run(live(server, WARM_UP, seed=1))
        server.assert_nothing_is_held(59)
        memory, files, threads = server.memory(), server.num_files(), server.num_threads()
        asyncio.run(live(server, REQUESTS, seed=2))
        server.assert_nothing_is_held(59)
        numbers = server.metrics()
        assert numbers["jaxserve:compilations_total"] == 0
        assert sum(value for name, value in numbers.items() if name.startswith("vllm:request_success_total")) > REQUESTS
        assert numbers["jaxserve:aborts_total{cause=client}"] > REQUESTS / 100
        # Connections that have just ended, and grpc's own pool, make a difference of a few.
        assert server.num_files() <= files + 8 and server.num_threads() <= threads + 4
        growth = server.memory() - memory
        assert growth < MOST_GROWTH, f"{growth / 1e6:.1f} MB more after {REQUESTS} requests"
