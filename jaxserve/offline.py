"""The requests of one call: started together, waited for, and abandoned together; or streamed one by one.

Blocking and coroutine versions stand side by side. What they ask of an engine is `Engine`; `LLM` is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

from jaxserve.engine.processor import ProcessedRequest
from jaxserve.errors import EngineClosedError, RequestError
from jaxserve.inputs import failed_output, new_request_id, progress_bar
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams

Process = Callable[[Any, SamplingParams], ProcessedRequest]

_BAR_REFRESH = 0.2  # seconds


class Engine(Protocol):
    """What is asked of an LLM here; see there."""

    def submit(self, processed: ProcessedRequest, on_event: Callable[[StreamEvent], None],
               request_id: str | None = None, *, patient: bool = False) -> str: ...

    def abort(self, request_id: str) -> None: ...

    def settle(self) -> None: ...


def run(engine: Engine, items: list[Any], each: Sequence[SamplingParams], process: Process, *, single: bool,
        use_tqdm: bool) -> list[RequestOutput]:
    """Processes `items` (prompts or conversations), runs those that are valid, and waits for all. The engine works on
    the first ones while the others are processed.

    Args:
        each: an item's options.
        single: there is one item, whose error is raised.
    """
    done: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
    batch = _Batch(items, each, done.put, use_tqdm)
    try:
        for _ in batch.start(engine, process):
            while not done.empty():
                batch.finish(*done.get())
        while batch.unfinished:
            try:
                batch.finish(*done.get(timeout=_BAR_REFRESH))
            except queue.Empty:
                batch.show()
    except BaseException:
        # An interrupt, usually. Wait until the engine has let go, so that the next call starts clean.
        batch.abandon(engine)
        with contextlib.suppress(EngineClosedError):
            engine.settle()
        raise
    finally:
        batch.bar.close()
    return batch.results(single)


async def arun(engine: Engine, items: list[Any], each: Sequence[SamplingParams], process: Process, *, single: bool,
               use_tqdm: bool) -> list[RequestOutput]:
    """As `run`; what takes time happens in other threads."""
    loop = asyncio.get_running_loop()
    done: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()

    def deliver(item: tuple[int, RequestOutput]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, so nobody waits any more
            loop.call_soon_threadsafe(done.put_nowait, item)

    batch = _Batch(items, each, deliver, use_tqdm)

    def start() -> None:
        for _ in batch.start(engine, process):
            pass

    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        while batch.unfinished:
            if starting.done():
                starting.result()  # raises what has ended it early
            try:
                # Python 3.11's wait_for would lose a cancellation that comes with an item.
                async with asyncio.timeout(_BAR_REFRESH):
                    item = await done.get()
            except TimeoutError:
                batch.show()
            else:
                batch.finish(*item)
        await starting
    except BaseException:  # cancelled, usually
        starting.cancel()
        batch.abandon(engine)
        raise
    finally:
        batch.bar.close()
    return batch.results(single)


def stream(engine: Engine, processed: ProcessedRequest) -> Generator[StreamEvent, None, None]:
    """Starts a request at once; its events as they come. The engine lives as long as the iterator."""
    events: queue.SimpleQueue[StreamEvent] = queue.SimpleQueue()
    request_id = engine.submit(processed, events.put)

    def iterate() -> Generator[StreamEvent, None, None]:
        try:
            finished = False
            while not finished:
                event = events.get()
                finished = _is_last(event)
                yield event
        finally:
            engine.abort(request_id)  # no effect on one that has ended

    iterator = iterate()
    # A generator that is dropped before its first event never enters its try block.
    weakref.finalize(iterator, engine.abort, request_id).atexit = False
    return iterator


async def astream(engine: Engine, process: Callable[[], ProcessedRequest]) -> AsyncGenerator[StreamEvent, None]:
    """As `stream`; the request is processed, in another thread, and starts when the first event is awaited."""
    processed = await asyncio.to_thread(process)
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def deliver(event: StreamEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, so nobody waits any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    request_id = engine.submit(processed, deliver)
    try:
        finished = False
        while not finished:
            event = await events.get()
            finished = _is_last(event)
            yield event
    finally:
        engine.abort(request_id)  # no effect on one that has ended


class _Batch:
    """The requests of one call, their outputs so far, and its progress bar.

    Args:
        items: prompts or conversations.
        each: an item's options.
        deliver: called, in the engine's thread or in that of `start`, with the index and the output of each that ends.
    """

    def __init__(self, items: list[Any], each: Sequence[SamplingParams],
                 deliver: Callable[[tuple[int, RequestOutput]], None], use_tqdm: bool):
        self._items = items
        self._each = each
        self._request_ids = [new_request_id() for _ in items]
        self._outputs: dict[int, RequestOutput] = {}
        self._abandoned = False
        self._deliver = deliver
        self._num_tokens = 0
        self._started = time.perf_counter()
        self.bar = progress_bar(len(items), use_tqdm)

    def start(self, engine: Engine, process: Process) -> Iterator[None]:
        """Processes the items in their order and submits those that are valid; yields after each."""
        requests = zip(self._items, self._each, self._request_ids, strict=True)
        for index, (item, params, request_id) in enumerate(requests):
            try:
                processed = process(item, params)
            except RequestError as error:
                self._deliver((index, failed_output(item, error)))
            else:
                if not self._abandoned:
                    engine.submit(processed, self._listener(index), request_id, patient=True)
            if self._abandoned:  # from another thread, and perhaps just before the request was submitted
                engine.abort(request_id)
                return
            yield

    def abandon(self, engine: Engine) -> None:
        """Aborts what was started, and starts nothing more."""
        self._abandoned = True
        for request_id in self._request_ids:
            engine.abort(request_id)  # no effect on one that was not started

    @property
    def unfinished(self) -> int:
        return len(self._items) - len(self._outputs)

    def _listener(self, index: int) -> Callable[[StreamEvent], None]:
        def on_event(event: StreamEvent) -> None:
            self._num_tokens += len(event.token_ids)
            if event.output is not None:
                self._deliver((index, event.output))
        return on_event

    def finish(self, index: int, output: RequestOutput) -> None:
        self._outputs[index] = output
        self.show(refresh=False)
        self.bar.update(1)  # redraws, but not too often

    def show(self, refresh: bool = True) -> None:
        rate = self._num_tokens / (time.perf_counter() - self._started)
        self.bar.set_postfix_str(f"{rate:.1f} tok/s", refresh)

    def results(self, single: bool) -> list[RequestOutput]:
        """In the order of the prompts. Raises the error of a `single` one."""
        outputs = [self._outputs[index] for index in range(len(self._outputs))]
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs


def _is_last(event: StreamEvent) -> bool:
    """Whether the event ends its request. Raises the request's error if it failed."""
    if event.output is None:
        return False
    if event.output.error is not None:
        raise event.output.error
    return True
