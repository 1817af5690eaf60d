"""Several running requests as one, clients that leave, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.serving.http.answers import to_json
from jaxserve.serving.http.errors import api_error
from jaxserve.serving.request_stream import RequestStream

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; cancels it when the client leaves, and raises ClientGone. The body has to be read before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def start_all(starts: Sequence[Coroutine[Any, Any, RequestStream]]) -> list[RequestStream]:
    """All of them run, or none: if one is refused the others are aborted."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, RequestStream):
                await result.aclose()
        raise


async def outputs_of(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Reads all to their ends. If one fails, or this is cancelled, all are aborted."""
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(events_of(streams)) as events:
        async for index, event in events:
            if event.output is not None:
                outputs[index] = event.output
    return [outputs[index] for index in range(len(streams))]


async def events_of(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """The events of all streams as they come, with the index of their stream. Closing aborts what still runs."""
    try:
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
        else:
            async with contextlib.aclosing(_merged(streams)) as events:
                async for item in events:
                    yield item
    finally:
        for stream in streams:
            await stream.aclose()


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    # Room for one: what its reader does not fetch stays in the mailboxes, which merge.
    queue: asyncio.Queue[tuple[int, StreamEvent] | Exception | None] = asyncio.Queue(1)

    async def read(index: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    running = len(readers)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def sse(data: Any) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


async def guarded(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream, and what ends it: an error as an event of its own, and always [DONE]."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        yield sse(api_error(error).body())
    yield DONE


class EventStream:
    """A response of server-sent events, made from `streams`, which are aborted when the client leaves. `events` has to
    say by itself what goes wrong."""

    def __init__(self, events: AsyncGenerator[bytes, None], streams: Sequence[RequestStream]):
        self._events = events
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send(send))
        finally:  # closing a generator that has not begun closes nothing that it holds
            for stream in self._streams:
                await stream.aclose()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no")]})
            async for event in events:  # `send` waits while the client's buffers are full
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
