"""Threads, event loops and interrupts, as they come in scripts, servers and notebooks."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve import RequestError, SamplingParams
from tests.llm.tiny import prompt_ids

SHORT = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [prompt_ids(n, seed=n) for n in (3, 20, 35, 70)]


@pytest.fixture(scope="module")
def expected(dense) -> list[list[int]]:
    return [dense.greedy(prompt, 9) for prompt in PROMPTS]


def all_pages_free(llm) -> bool:
    metrics = llm.metrics()
    return metrics["pages_free"] == metrics["pages_total"] and metrics["running"] == metrics["waiting"] == 0


async def collect(stream) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


# -- event loops


def test_generate_inside_a_running_loop(llm, expected):
    async def cell():
        return llm.generate(PROMPTS, SHORT, use_tqdm=False)

    assert [output.outputs[0].token_ids for output in asyncio.run(cell())] == expected


def test_many_async_streams_at_once(llm, expected):
    async def main():
        return await asyncio.gather(*(collect(llm.astream(prompt, SHORT)) for prompt in PROMPTS * 3))

    assert asyncio.run(main()) == expected * 3


def test_async_streams_beside_blocking_calls(llm, expected):
    async def main():
        in_thread = asyncio.to_thread(llm.generate, PROMPTS, SHORT, use_tqdm=False)
        return await asyncio.gather(in_thread, *(collect(llm.astream(prompt, SHORT)) for prompt in PROMPTS))

    outputs, *streams = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == streams == expected


def test_an_async_streams_last_event_has_the_output(llm):
    async def main():
        return [event async for event in llm.astream(PROMPTS[0], SHORT)]

    events = asyncio.run(main())
    assert [event.output is None for event in events] == [True] * (len(events) - 1) + [False]
    assert "".join(event.text for event in events) == events[-1].output.text


@pytest.mark.parametrize("how", ["cancel", "break", "aclose", "loop ends"])
def test_leaving_an_async_stream_aborts_it(llm, how):
    async def main():
        stream = llm.astream(PROMPTS[0], LONG)
        if how == "cancel":
            started = asyncio.Event()

            async def consume():
                async for _ in stream:
                    started.set()

            task = asyncio.create_task(consume())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "break":
            async for _ in stream:
                break
            await stream.aclose()
        else:
            await anext(stream)
            if how == "aclose":
                await stream.aclose()

    asyncio.run(main())
    assert all_pages_free(llm)


def test_an_async_request_is_checked_in_another_thread(llm, monkeypatch):
    threads = []
    process = llm.process_chat
    monkeypatch.setattr(llm, "process_chat", lambda *args, **options: (
        threads.append(threading.current_thread()), process(*args, **options))[1])

    async def main():
        with pytest.raises(RequestError, match="at most 127"):
            await collect(llm.astream(prompt_ids(128)))
        await collect(llm.astream_chat([{"role": "user", "content": "hi"}], SHORT))

    asyncio.run(main())
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_async_chat(llm):
    messages = [{"role": "user", "content": "hi"}]

    async def main():
        return await collect(llm.astream_chat(messages, SHORT))

    assert asyncio.run(main()) == llm.chat(messages, SHORT, use_tqdm=False)[0].outputs[0].token_ids


# -- lists of requests in coroutines


def test_agenerate_gives_what_generate_gives_while_the_loop_runs_on(llm, expected):
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        counting = asyncio.create_task(count_turns())
        outputs = await llm.agenerate(PROMPTS * 3, SHORT, use_tqdm=False)
        counting.cancel()
        return outputs

    assert [output.outputs[0].token_ids for output in asyncio.run(main())] == expected * 3
    assert turns > 10


def test_many_agenerate_calls_at_once_with_their_own_options(llm, expected):
    async def main():
        return await asyncio.gather(*(
            llm.agenerate(prompt, max_tokens=n, temperature=0, ignore_eos=True, use_tqdm=False)
            for prompt in PROMPTS for n in (1, 5)))

    found = [[output.outputs[0].token_ids for output in outputs] for outputs in asyncio.run(main())]
    assert found == [[ids[:n]] for ids in expected for n in (1, 5)]


def test_agenerate_reports_invalid_prompts_as_generate_does(llm, expected):
    async def main():
        outputs = await llm.agenerate([PROMPTS[0], [], PROMPTS[1]], SHORT, use_tqdm=False)
        assert await llm.agenerate([], use_tqdm=False) == []
        with pytest.raises(RequestError, match="empty"):
            await llm.agenerate("", SHORT, use_tqdm=False)
        return outputs

    outputs = asyncio.run(main())
    assert isinstance(outputs[1].error, RequestError)
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == expected[:2]


def test_cancelling_agenerate_aborts_its_requests(llm, expected):
    async def main():
        task = asyncio.create_task(llm.agenerate([prompt_ids(5, seed=i) for i in range(50)], LONG, use_tqdm=False))
        while not (await asyncio.to_thread(llm.metrics))["running"]:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert all_pages_free(llm)
    assert llm.generate(PROMPTS[0], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected[0]


def test_achat(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "bye")]

    async def main():
        return await llm.achat(conversations, SHORT, use_tqdm=False, chat_template_kwargs={"x": 1})

    assert [output.outputs for output in asyncio.run(main())] == [
        output.outputs for output in llm.chat(conversations, SHORT, use_tqdm=False)]


# -- streams


def test_leaving_a_stream_aborts_it(llm):
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()
    assert all_pages_free(llm)
    llm.stream(PROMPTS[0], LONG)  # dropped before its first event
    assert all_pages_free(llm)


def test_streams_run_side_by_side(llm, expected):
    streams = [llm.stream(prompt, SHORT) for prompt in PROMPTS]
    assert [[token for event in stream for token in event.token_ids] for stream in reversed(streams)] == expected[::-1]


# -- threads


def test_threads(llm, expected):
    def call(i: int) -> list[int]:
        return llm.generate([PROMPTS[i % 4]], SHORT, use_tqdm=False)[0].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(24))) == expected * 6


# -- interrupts


@pytest.fixture
def interrupt(llm):
    """Sends the main thread a Ctrl-C as soon as something runs.

    Without collections of garbage: jax has a callback there, and an interrupt that comes in a callback is lost.
    """
    gc.disable()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def send() -> None:
        while not llm.metrics()["running"]:
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threads = []

    def start() -> None:
        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGINT, handler)
    gc.enable()


def test_an_interrupt_leaves_the_engine_usable(llm, expected, interrupt):
    for _ in range(3):
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt_ids(5, seed=i) for i in range(200)], LONG, use_tqdm=False)
        assert all_pages_free(llm)
    assert llm.generate(PROMPTS[0], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected[0]


def test_an_interrupted_stream_is_aborted(llm, interrupt):
    def endless():
        while True:
            yield from llm.stream(prompt_ids(5), LONG)

    interrupt()
    with pytest.raises(KeyboardInterrupt):
        for _ in endless():
            pass
    assert all_pages_free(llm)
