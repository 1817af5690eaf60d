"""The device fails in the middle of streams, over HTTP and gRPC at once, on one engine."""

from __future__ import annotations

import json
import threading

import pytest

from jaxserve import LLM
from jaxserve.client import Client, ServerError
from jaxserve.serving.service import State
from tests.llm import tiny
from tests.serving.grpc.harness import PATIENCE, Loop, running, wait_until
from tests.serving.http.conftest import serving

TOKENS = 40
OPTIONS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


class Faults:
    """Makes launches of steps fail, once both sequences have ten tokens; `launches` counts them from there on."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, *fails: int):
        self.launches = 0
        launch = llm._runner.launch

        def faulty(plan):
            if self.launches or len([row for row in plan.decodes if row.seq.num_known >= row.seq.prompt_len + 10]) == 2:
                self.launches += 1
                if self.launches in fails:
                    raise RuntimeError("the device is on fire")
            return launch(plan)

        monkeypatch.setattr(llm._runner, "launch", faulty)


@pytest.fixture
def faces(xla_cache):
    """An engine with an HTTP and a gRPC face."""
    # Deterministic: recomputed sequences go on exactly where they were.
    options = tiny.ENGINE | {"deterministic": True, "compilation_cache_dir": xla_cache}
    with LLM(config=tiny.CONFIG, params=tiny.random_tensors(), tokenizer=tiny.tokenizer(), **options) as llm:
        loop = Loop()
        with serving(llm) as http, running(loop, llm) as grpc, Client(grpc.target) as client, http.http() as web:
            yield llm, http, grpc, client, web
        loop.close()


def stream_on_both(llm, http, grpc, client, web) -> tuple[str, object]:
    """The body of a stream over HTTP; the events of one over gRPC, or the error that it ended with. They run together
    from their first step to their last."""
    bodies: list[str] = []
    both_are_there = threading.Event()
    llm.call_soon(lambda: both_are_there.wait(PATIENCE))
    reader = threading.Thread(target=lambda: bodies.append(
        web.post("/v1/completions", json={"prompt": "abc", "stream": True, **OPTIONS}).text))
    reader.start()
    events = []
    try:
        stream = client.stream("xyz", **OPTIONS)
        wait_until(lambda: http.service.num_active == grpc.service.num_active == 1)
        both_are_there.set()
        for event in stream:
            events.append(event)
        answer = events
    except ServerError as error:
        assert events, "it failed before it began"
        answer = error
    reader.join(PATIENCE)
    return bodies[0], answer


def text_of(body: str) -> str:
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if "choices" in event)


def test_a_step_that_fails_once_is_not_noticed(faces, monkeypatch):
    llm, _, grpc, _, _ = faces
    alone = [llm.generate(text, **OPTIONS, use_tqdm=False)[0].outputs[0].text for text in ("abc", "xyz")]
    faults = Faults(llm, monkeypatch, 1, 20)
    body, events = stream_on_both(*faces)
    assert faults.launches > 20
    assert [text_of(body), "".join(event.text for event in events)] == alone
    assert body.endswith("data: [DONE]\n\n")
    grpc.assert_idle()


def test_steps_that_fail_twice_end_the_streams_and_not_the_server(faces, monkeypatch):
    llm, _, grpc, _, _ = faces
    Faults(llm, monkeypatch, 1, 2)
    body, answer = stream_on_both(*faces)
    assert '"type":"server_error"' in body and body.endswith("data: [DONE]\n\n") and text_of(body)
    assert isinstance(answer, ServerError) and answer.code == "INTERNAL"
    monkeypatch.undo()
    body, events = stream_on_both(*faces)
    assert '"finish_reason":"length"' in body and events[-1].finish_reason == "length"
    grpc.assert_idle()


def test_an_engine_that_dies_turns_both_faces_red(faces, monkeypatch):
    llm, http, grpc, client, web = faces

    def broken():
        raise SystemError("a bug of ours")

    monkeypatch.setattr(llm._core, "step", broken)
    answers = [web.post("/v1/completions", json={"prompt": "abc", **OPTIONS}).status_code]
    wait_until(lambda: http.service.state is grpc.service.state is State.FAILED)
    answers.append(web.post("/v1/completions", json={"prompt": "abc"}).status_code)
    assert answers == [500, 503] and web.get("/health").status_code == 503
    with pytest.raises(ServerError, match="UNAVAILABLE"):
        client.generate("xyz", **OPTIONS)
