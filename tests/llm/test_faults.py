"""What fails, fails alone, with its cause; the engine goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxserve import EngineClosedError, EngineError, RequestError, SamplingParams
from jaxserve.engine.core import Request
from jaxserve.engine.output_builder import RequestState
from tests.llm import tiny
from tests.llm.tiny import prompt_ids

POISON = 250
PROMPTS = [prompt_ids(n, seed=n) for n in (5, 40, 70)]
PARAMS = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1),
          SamplingParams(seed=1, max_tokens=14, ignore_eos=True),
          SamplingParams(seed=2, max_tokens=25, ignore_eos=True, top_p=0.9)]


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def all_pages_free(llm) -> bool:
    metrics = llm.metrics()
    return metrics["pages_free"] == metrics["pages_total"] and metrics["running"] == metrics["waiting"] == 0


# -- one request


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "deterministic"])
def poisoned(make_llm, request):
    """A model whose answer to any prompt with POISON in it is NaN."""
    tensors = tiny.random_tensors()
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    options = {"deterministic": True, "max_num_batched_tokens": 128} if request.param else {}
    with make_llm(params=tensors, **options) as llm:
        yield llm


@pytest.mark.parametrize("at", [0, 20, 39, 66])
def test_a_nan_fails_its_request_alone(poisoned, at):
    prompts = [[token for token in prompt if token != POISON] for prompt in PROMPTS]
    masked = [params.clone(logit_bias={POISON: -100}) for params in PARAMS]
    expected = poisoned.generate(prompts, masked, use_tqdm=False)
    bad = prompt_ids(67, seed=3)
    bad[at] = POISON
    for _ in range(3):  # so that their pages are used again
        poisoned.reset_prefix_cache()
        outputs = poisoned.generate([prompts[0], bad, *prompts[1:], bad],
                                    [masked[0], PARAMS[0], *masked[1:], PARAMS[1]], use_tqdm=False)
        fine = [outputs[i] for i in (0, 2, 3)]
        assert ids(fine) == ids(expected)
        if poisoned.config.deterministic:
            assert fine[0].outputs[0].logprobs == expected[0].outputs[0].logprobs
        for i in (1, 4):
            assert isinstance(outputs[i].error, EngineError) and "not finite" in str(outputs[i].error)
            assert outputs[i].outputs[0].finish_reason == "error"
    assert all_pages_free(poisoned)
    assert ids(poisoned.generate(prompts, masked, use_tqdm=False)) == ids(expected)


def test_a_nan_raises_from_what_serves_one_request(poisoned):
    with pytest.raises(EngineError, match="not finite"):
        poisoned.generate([1, POISON], PARAMS[0], use_tqdm=False)
    with pytest.raises(EngineError, match="not finite"):
        list(poisoned.stream([1, POISON], PARAMS[0]))


def test_a_nan_ends_every_completion(poisoned):
    [output] = poisoned.generate([[1, POISON]], PARAMS[1].clone(n=3), use_tqdm=False)
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert all_pages_free(poisoned)


def test_a_fault_in_a_requests_text_is_its_own(llm, monkeypatch):
    def append(self, index, token_ids, rows=None, append=RequestState.append):
        if self.processed.prompt_token_ids == PROMPTS[1]:
            raise UnicodeError("cannot spell")
        return append(self, index, token_ids, rows)

    monkeypatch.setattr(RequestState, "append", append)
    expected = ids([llm.generate(PROMPTS[i], PARAMS[i], use_tqdm=False)[0] for i in (0, 2)])
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert ids(outputs[::2]) == expected
    assert isinstance(outputs[1].error.__cause__, UnicodeError)
    assert all_pages_free(llm)


def test_a_listener_that_raises_disturbs_nobody(llm):
    def on_event(event):
        raise ValueError("listener")

    processed = llm._processor.process(PROMPTS[0], PARAMS[0])
    expected = ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    llm._thread.submit(Request(RequestState("x", processed, None), on_event, patient=True))
    assert ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert all_pages_free(llm)


# -- steps


def break_steps(monkeypatch, runner, method: str, fails) -> list[int]:
    """`fails(number of the call)` makes a runner's method lose the device's state and raise. Returns the calls."""
    calls: list[int] = []
    original = getattr(runner, method)

    def broken(work):
        calls.append(len(calls))
        if fails(calls[-1]):
            original(work)  # the state is given away, and the ids of this step are lost
            runner._delete_state()
            raise RuntimeError("device lost")
        return original(work)

    monkeypatch.setattr(runner, method, broken)
    return calls


@pytest.mark.parametrize("method", ["launch", "fetch"])
@pytest.mark.parametrize("which", [{0}, {1}, {7}, {3, 9, 15}], ids=str)
def test_a_step_that_fails_is_computed_again(llm, monkeypatch, method, which):
    expected = ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with monkeypatch.context() as patch:
        calls = break_steps(patch, llm._runner, method, lambda i: i in which)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) > max(which)
    assert ids(outputs) == expected
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [20, 0, 0]
    assert all_pages_free(llm)


@pytest.mark.parametrize("method", ["launch", "fetch"])
def test_steps_that_always_fail_end_every_request(llm, monkeypatch, method):
    expected = ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with monkeypatch.context() as patch:
        break_steps(patch, llm._runner, method, lambda _: True)
        outputs = llm.generate([*PROMPTS] * 4, [*PARAMS] * 4, use_tqdm=False)
        for output in outputs:
            assert isinstance(output.error, EngineError) and "device lost" in str(output.error)
            assert isinstance(output.error.__cause__, RuntimeError)
        assert len({id(output.error) for output in outputs}) == len(outputs)  # each may be raised in its own thread
        with pytest.raises(EngineError, match="device lost") as caught:
            list(llm.stream(PROMPTS[0], PARAMS[0]))
        assert str(caught.value.__cause__) == "device lost"
    assert all_pages_free(llm)
    assert ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


# -- the thread


def test_nobody_waits_for_a_thread_that_has_failed(make_llm, monkeypatch):
    llm = make_llm()
    llm.generate([1], max_tokens=1, use_tqdm=False)
    broken = ZeroDivisionError("bug")

    def fail(*_):
        raise broken

    monkeypatch.setattr(llm._core.scheduler, "schedule", fail)
    monkeypatch.setattr(llm._core.scheduler, "requeue_all", fail)  # and so recovery fails too
    release = threading.Event()
    llm._thread.call_soon(release.wait)
    streams = [llm.stream([1, 2], PARAMS[0]) for _ in range(3)]
    errors = []

    def call() -> None:
        try:
            errors.extend(output.error for output in llm.generate([[1], [2]], PARAMS[1], use_tqdm=False))
        except EngineClosedError as error:  # it came too late
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    release.set()
    for caller in callers:
        caller.join()
    for stream in streams:
        with pytest.raises(EngineError, match="bug") as caught:
            next(stream)
        assert caught.value.__cause__ is broken
    assert len(errors) >= 4 and all(error.__cause__ is broken for error in errors)
    for call in (llm.metrics, lambda: llm.generate([1], use_tqdm=False), lambda: llm.stream([1])):
        with pytest.raises(EngineClosedError):
            call()
    assert llm.closed
    llm.close()


# -- what callers get wrong


def test_a_bad_prompt_in_a_list_has_its_error_in_its_place(llm, dense):
    outputs = llm.generate([[1, 2], prompt_ids(200), [tiny.VOCAB], [], "", "\ud800", {"text": "x"}, None, [3, 4]],
                           SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    for output in (outputs[0], outputs[-1]):
        assert output.error is None
        assert output.outputs[0].token_ids == dense.greedy(output.prompt_token_ids, 3)
    for output, message in zip(outputs[1:-1], ("200 tokens", "token id 272", "empty", "empty", "surrogate", "dict",
                                               "list of token ids")):
        assert isinstance(output.error, RequestError) and message in str(output.error)
        assert output.finished and output.outputs[0].finish_reason == "error" and output.text == ""


def test_a_bad_prompt_on_its_own_raises(llm):
    for prompt in (prompt_ids(200), "", {"prompt": 3}):
        with pytest.raises(RequestError):
            llm.generate(prompt, use_tqdm=False)
    for prompts in (None, 3):
        with pytest.raises(RequestError, match="prompts must be"):
            llm.generate(prompts, use_tqdm=False)


def test_wrong_sampling_params(llm):
    with pytest.raises(RequestError, match="unknown sampling option.*max_tokenz"):
        llm.generate([1], max_tokenz=3)
    with pytest.raises(RequestError, match="not both"):
        llm.generate([1], SamplingParams(), max_tokens=3)
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}]):
        with pytest.raises(RequestError, match="must be SamplingParams, got dict"):
            llm.generate(["a"], wrong)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(["a"], temperature=-1)
    assert all_pages_free(llm)
