"""The service, which both faces stand on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve import EngineClosedError, EngineError, QueueFullError, RequestError, SamplingParams
from jaxserve.engine.processor import CHEAP_CHARS
from jaxserve.serving.request_stream import DeadlineExceededError, UnavailableError
from jaxserve.serving.service import DuplicateRequestError, Rate, Service, State
from jaxserve.tokenizer import Tokenizer

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_llm):
    with make_llm() as llm:
        yield llm


def run(llm, test: Callable[[Service], Coroutine[Any, Any, None]], **limits) -> None:
    async def main() -> None:
        service = Service(model_name="tiny", **limits)
        await service.start(llm)
        await test(service)
        await service.drain(0)
        assert service.num_active == service.num_waiting == service.num_waiting_tokens == 0
        service.close()

    asyncio.run(main())
    numbers = llm.metrics()
    assert (numbers["running"], numbers["waiting"]) == (0, 0) and numbers["pages_free"] == numbers["pages_total"]


async def read(stream) -> tuple[str, list]:
    events = [event async for event in stream]
    return "".join(event.text for event in events), events


def test_a_stream_is_the_offline_result(llm):
    expected = llm.generate("Hello", SHORT.clone(n=2), use_tqdm=False)[0]

    async def test(service):
        async with await service.generate("Hello", SHORT.clone(n=2)) as stream:
            _, events = await read(stream)
        for index in range(2):
            mine = [event for event in events if event.index == index]
            assert "".join(event.text for event in mine) == expected.outputs[index].text
            assert [event.finish_reason for event in mine if event.finish_reason] == ["length"]
        output = events[-1].output
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.request_id == stream.request_id
        assert [event.output for event in events[:-1]] == [None] * (len(events) - 1)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(llm, test)


def test_increments_of_a_slow_reader_are_merged(llm):
    expected = llm.generate("Hello", LONG.clone(n=2, logprobs=1), use_tqdm=False)[0]

    async def test(service):
        async with await service.generate("Hello", LONG.clone(n=2, logprobs=1)) as stream:
            while service.num_active:  # the engine is done with it
                await asyncio.to_thread(llm.call_soon, lambda: None)
            assert len(stream._mailbox) == 2
            _, events = await read(stream)
        assert [event.text for event in sorted(events, key=lambda e: e.index)] == [o.text for o in expected.outputs]
        assert [len(event.logprobs) for event in events] == [len(event.token_ids) for event in events] == [100, 100]
        assert events[0].output is None and events[1].output is not None

    run(llm, test)


def test_chats(llm):
    messages = [{"role": "user", "content": "Hi"}]
    expected = llm.chat(messages, SHORT, use_tqdm=False, add_generation_prompt=False)[0]

    async def test(service):
        template = {"add_generation_prompt": False}
        async with await service.chat(messages, SHORT, template=template) as stream:
            assert stream.prompt_token_ids == expected.prompt_token_ids == await service.tokenize_chat(
                messages, template)
            assert (await read(stream))[0] == expected.text

    run(llm, test)


# -- ends


@pytest.mark.parametrize("leave", ["close", "cancel", "exception"])
def test_a_reader_that_leaves_aborts(llm, leave):
    async def test(service):
        async def reader():
            async with await service.generate("Hello", LONG) as stream:
                await anext(stream)
                if leave == "exception":
                    raise KeyError
                if leave == "cancel":
                    reading.set()
                    await read(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert stream.abort_cause == "client"

        reading = asyncio.Event()
        task = asyncio.create_task(reader())
        if leave == "cancel":
            await reading.wait()
            task.cancel()
        await asyncio.wait([task])
        assert leave != "close" or task.exception() is None
        assert await service.drain(300)

    run(llm, test)


def test_abort(llm):
    async def test(service):
        async with await service.generate("Hello", LONG, request_id="mine") as stream:
            await anext(stream)
            assert service.abort("mine") and service.abort("mine")
            _, events = await read(stream)
        assert events[-1].finish_reason == "abort" and stream.abort_cause == "abort"
        assert not service.abort("mine") and not service.abort("unknown")

    run(llm, test)


@pytest.mark.parametrize("cause", ["drain", "deadline", "abort"])
def test_what_has_ended_by_itself_is_not_aborted(llm, cause):
    """The engine made the end, and nobody here knew of it yet."""
    async def test(service):
        async with await service.generate("Hello", SHORT) as stream:
            deliver = service._deliver
            service._deliver = lambda: None
            while not service._outbox or service._outbox[-1][1].output is None:
                await asyncio.to_thread(llm.call_soon, lambda: None)
            stream.abort(cause)
            service._deliver = deliver
            deliver()
            _, events = await read(stream)
        assert events[-1].finish_reason == "length" and len(events[-1].output.outputs[0].token_ids) == 6
        assert stream.abort_cause is None

    run(llm, test)


@pytest.mark.parametrize("deadline", [0, 1e-9, 0.01])
def test_deadlines(llm, deadline):
    async def test(service):
        with pytest.raises(DeadlineExceededError):
            async with await service.generate("Hello", LONG, deadline=deadline) as stream:
                await read(stream)
        async with await service.generate("Hello", SHORT, deadline=300) as stream:
            assert (await read(stream))[1][-1].finish_reason == "length"

    run(llm, test)


# -- refusals


def test_invalid_requests_are_refused_before_anything_runs(llm):
    async def test(service):
        for prompt, params in (("", SHORT), ("x" * 200, SHORT), ([9999], SHORT), ("a", LONG.clone(priority=1))):
            with pytest.raises(RequestError):
                await service.generate(prompt, params)
            assert service.num_active == service.num_waiting == 0

    run(llm, test)


def test_ids_in_use(llm):
    async def test(service):
        async with await service.generate("Hello", LONG, request_id="mine") as stream:
            with pytest.raises(DuplicateRequestError, match="mine"):
                await service.generate("Hello", SHORT, request_id="mine")
            assert (await anext(stream)).token_ids
        assert await service.drain(300)

    run(llm, test)


def test_too_many_waiting_tokens(llm):
    async def test(service):
        starts = [service.generate("x" * 30, SHORT) for _ in range(5)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        assert sum(isinstance(result, QueueFullError) for result in results) == 3
        for stream in results:
            if not isinstance(stream, QueueFullError):
                await read(stream)
        async with await service.generate("x" * 100, SHORT) as stream:  # alone it may have more
            await read(stream)

    run(llm, test, max_waiting_tokens=60)


def test_the_rate_is_that_of_the_last_ten_seconds():
    rate = Rate()
    assert rate.value(0.0) == 0
    for tenth in range(50):
        rate.add(2, tenth / 20)
    assert rate.value(2.5) == 10
    assert 0 < rate.value(11.0) < 10
    assert rate.value(13.0) == 0
    rate.add(5, 14.0)
    assert rate.value(14.0) == 0.5


# -- life cycle


def test_states(make_llm):
    async def main():
        with make_llm() as llm:
            service = Service(model_name="tiny")
            seen = []
            service.add_listener(seen.append)
            with pytest.raises(UnavailableError, match="starting"):
                await service.generate("Hello", SHORT)
            await service.start(llm)
            stream = await service.generate("Hello", LONG)
            assert not await service.drain(0)
            with pytest.raises(UnavailableError, match="shut down"):
                await read(stream)
            with pytest.raises(UnavailableError, match="draining"):
                await service.generate("Hello", SHORT)
            numbers = await service.engine_metrics()
            assert numbers["running"] == 0
            await asyncio.to_thread(llm.close)
            while service.state is not State.FAILED:
                await asyncio.sleep(0)
            assert seen == [State.STARTING, State.READY, State.DRAINING, State.FAILED]
            assert await service.engine_metrics() == numbers  # the last that are known
            service.close()

    asyncio.run(main())


def test_an_engine_that_fails_ends_streams_with_its_error(make_llm, monkeypatch):
    async def main():
        with make_llm() as llm:
            service = Service(model_name="tiny")
            await service.start(llm)
            stream = await service.generate("Hello", LONG)
            await anext(stream)

            def broken():
                raise SystemError("a bug of ours")

            monkeypatch.setattr(llm._core, "step", broken)
            with pytest.raises(Exception, match="a bug of ours"):
                await read(stream)
            while service.state is not State.FAILED:
                await asyncio.sleep(0)
            with pytest.raises((UnavailableError, EngineClosedError)):
                await service.generate("Hello", SHORT)
            assert service.num_active == 0
            service.close()

    asyncio.run(main())


def test_what_was_made_before_a_fault_is_not_lost(llm, monkeypatch):
    """Also if nobody has read it until then."""
    launch = llm._runner.launch

    def fails(plan):
        if plan.decodes and plan.decodes[0].seq.num_known >= plan.decodes[0].seq.prompt_len + 4:
            raise RuntimeError("the device is on fire")
        return launch(plan)

    async def test(service):
        monkeypatch.setattr(llm._runner, "launch", fails)
        async with await service.generate("Hello", SHORT) as stream:
            assert await service.idle(300)
            made = await anext(stream)
            assert made.token_ids and made.text and made.finish_reason is None and made.output is None
            with pytest.raises(EngineError):
                await anext(stream)
        monkeypatch.undo()

    run(llm, test)


def test_long_texts_hold_up_no_short_ones(llm):
    """Several long ones, as of several clients, wait for each other."""
    async def test(service):
        go = threading.Event()
        long = [asyncio.ensure_future(service.run_text(go.wait, 1 << 20)) for _ in range(5)]
        assert await service.tokenize("abc") == list(b"abc")
        async with await service.generate("Hello", SHORT) as stream:
            assert len((await read(stream))[0])
        assert not any(task.done() for task in long)
        go.set()
        await asyncio.gather(*long)

    run(llm, test)


def test_a_deadline_hides_no_cancel(llm):
    """Not even in the very moment in which the prompt is ready."""
    async def test(service):
        ready = asyncio.Event()

        async def run_text(*_):
            await ready.wait()
            return llm.process("Hello", SHORT)

        service.run_text = run_text
        starting = asyncio.ensure_future(service.generate("Hello", SHORT, deadline=300))
        while not ready._waiters:
            await asyncio.sleep(0)
        ready.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(llm, test)


def test_a_failed_look_at_the_engine_is_not_the_last(llm, monkeypatch):
    async def test(service):
        with monkeypatch.context() as broken:
            broken.setattr(llm._runner, "metrics", lambda: {}["no such number"])
            asked = asyncio.ensure_future(service.engine_metrics())
            while service._snapshot_task is None:
                await asyncio.sleep(0)
            asked.cancel()  # nobody waits for it any more
            await asyncio.wait([service._snapshot_task])
            with pytest.raises(KeyError):
                await service.engine_metrics()
        assert (await service.engine_metrics())["running"] == 0

    run(llm, test)


@pytest.mark.parametrize("length", [127 * 18 + 1, 5_000_000])
def test_what_can_never_fit_is_refused_unseen(llm, monkeypatch, length):
    """The longest token has 18 characters, and the prompt room for 127 tokens."""
    text = "x" * length
    messages = [{"role": "user", "content": text}]

    def encode(*_):
        raise AssertionError("it was encoded")

    async def test(service):
        monkeypatch.setattr(Tokenizer, "encode", encode)
        for start, param in ((service.generate(text, SHORT), "prompt"), (service.chat(messages, SHORT), "messages"),
                             (service.tokenize(text), "prompt")):
            with pytest.raises(RequestError, match=r"characters.* max_model_len is 128") as refusal:
                await start
            assert refusal.value.param == param
        monkeypatch.undo()

    run(llm, test)


def test_more_than_the_context_can_be_tokenized_but_not_everything(llm):
    async def test(service):
        text = "x" * 10_000
        assert len(await service.tokenize(text, must_fit=False)) == 10_000
        assert len(await service.tokenize_chat([{"role": "user", "content": text}])) > 10_000
        for start in (service.tokenize("x" * (CHEAP_CHARS + 1), must_fit=False),
                      service.tokenize_chat([{"role": "user", "content": "x" * CHEAP_CHARS}])):
            with pytest.raises(RequestError, match=str(CHEAP_CHARS)):
                await start

    run(llm, test)


def test_a_conversation_is_measured_before_it_is_rendered(llm, monkeypatch):
    def render(*_, **__):
        raise AssertionError("it was rendered")

    async def test(service):
        monkeypatch.setattr(Tokenizer, "render_chat", render)
        long = "x" * CHEAP_CHARS
        for messages, template in (([{"role": "user", "content": long}], {}),
                                   ([{"role": "user", "content": [{"type": "text", "text": long}]}], {}),
                                   ([{"role": "user", "content": ""}] * 200_000, {}),
                                   ([{"role": "user", "content": "a"}], {"tools": [{"name": long}]}),
                                   ([{"role": "user", "content": "a"}], {"chat_template_kwargs": {"x": long}})):
            with pytest.raises(RequestError, match="max_model_len is 128") as refusal:
                await service.chat(messages, SHORT, template=template)
            assert refusal.value.param == "messages"
        monkeypatch.undo()

    run(llm, test)
