"""An engine begins, ends, and gives back what it held."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from safetensors.numpy import save_file

import jaxserve
from jaxserve import ConfigError, EngineClosedError, SamplingParams, one_call
from tests.llm import tiny
from tests.llm.tiny import prompt_ids

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def ids(llm, prompt=(1, 2, 3)) -> list[int]:
    return llm.generate(list(prompt), SHORT, use_tqdm=False)[0].outputs[0].token_ids


# -- memory


def test_close_frees_the_devices_memory(make_llm):
    before = live_bytes()
    llm = make_llm()
    ids(llm)
    assert live_bytes() > before + llm.metrics()["kv_pool_bytes"]
    llm.close()
    assert live_bytes() == before


def test_dropping_the_last_reference_does_so_too(make_llm):
    before = live_bytes()
    threads = threading.active_count()
    llm = make_llm()
    ids(llm)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    del llm, stream
    assert live_bytes() == before
    assert threading.active_count() == threads


def test_a_stream_keeps_its_engine_alive(make_llm):
    llm = make_llm()
    stream = llm.stream([1, 2], SHORT)
    del llm
    gc.collect()
    assert list(stream)[-1].output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("fail", ["options", "engine"])
def test_a_constructor_that_fails_leaves_nothing(make_llm, monkeypatch, fail):
    before = live_bytes()
    if fail == "options":  # found when the weights are on the device
        with pytest.raises(ConfigError, match="max_num_batched_tokens=8"):
            make_llm(max_num_batched_tokens=8)
    else:
        def broken(*_):
            raise RuntimeError("no engine")

        monkeypatch.setattr("jaxserve.llm.EngineCore", broken)
        with pytest.raises(RuntimeError, match="no engine"):
            make_llm()
    assert live_bytes() == before


def test_the_next_engine_may_use_the_same_weights(make_llm, dense):
    params = jax.tree.map(jax.numpy.asarray, tiny.decoder_params())
    for _ in range(2):
        with make_llm(params=params) as llm:
            assert ids(llm) == dense.greedy((1, 2, 3), 5)


# -- several engines


def test_two_at_once(make_llm, llm, dense):
    with make_llm(params=tiny.random_tensors(seed=1)) as other:
        streams = [engine.stream(prompt_ids(9), SHORT) for engine in (llm, other)]
        for _ in range(4):
            for stream in streams:
                next(stream)
        first, second = (list(stream)[-1].output.outputs[0].token_ids for stream in streams)
    assert first == dense.greedy(prompt_ids(9), 5) != second


# -- the end


def test_close_aborts_what_runs(make_llm, monkeypatch):
    llm = make_llm()
    stream = llm.stream([1], LONG)
    next(stream)
    waiting = [llm.stream([i], LONG) for i in range(5)]
    results, submitted = [], threading.Semaphore(0)
    submit = llm.submit
    monkeypatch.setattr(llm, "submit", lambda *args, **options: (submit(*args, **options), submitted.release()))
    caller = threading.Thread(target=lambda: results.extend(llm.generate([[1]] * 50, LONG, use_tqdm=False)))
    caller.start()
    for _ in range(50):
        submitted.acquire()
    llm.close()
    caller.join()
    assert {output.outputs[0].finish_reason for output in results} <= {"abort", "length"}
    assert results[-1].outputs[0].finish_reason == "abort"
    assert list(stream)[-1].finish_reason == "abort"
    assert all(list(stream)[-1].finish_reason == "abort" for stream in waiting)


def test_a_closed_engine_says_so(make_llm, tmp_path):
    with make_llm() as llm:
        assert not llm.closed
    assert llm.closed
    messages = [{"role": "user", "content": "hi"}]
    for call in (lambda: llm.generate([1]), lambda: llm.generate([]), lambda: llm.chat(messages),
                 lambda: llm.stream([1]), llm.metrics, llm.reset_prefix_cache,
                 lambda: llm.update_params(tiny.random_tensors()), lambda: llm.save_checkpoint(tmp_path / "x")):
        with pytest.raises(EngineClosedError):
            call()
    llm.close()


# -- jaxserve.generate


@pytest.fixture
def interrupted():
    """Runs a function with an interrupt before the given line that it comes to in one_call.py; whether there was one.

    Python looks for one after calls and as a function begins, so neither as `with` leaves its block nor between the end
    of `try` and the call in `finally`; these lines are spared."""
    source = inspect.getsource(one_call).splitlines()

    def run(function, number: int) -> bool:
        lines = itertools.count(1)

        def trace(frame, event, _):
            if frame.f_code.co_filename != one_call.__file__:
                return None
            line = source[frame.f_lineno - 1].strip()
            if event == "line" and not line.startswith(("with ", "lease.release()")) and next(lines) == number:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    return run


@pytest.mark.parametrize("is_new", [False, True])
def test_wherever_an_interrupt_comes_another_model_can_follow(monkeypatch, interrupted, is_new):
    class Engine:
        closed = False

        def __init__(self, *_, **__):
            pass

        def generate(self, *_, **__):
            return []

        def close(self):
            self.closed = True

    monkeypatch.setattr(one_call, "LLM", Engine)
    monkeypatch.setattr(one_call, "_kept", one_call._KeptEngine())
    number = 1
    while True:
        if not is_new:
            one_call.generate("model", [])
        was_interrupted = interrupted(lambda: one_call.generate("model", []), number)
        other = threading.Thread(target=one_call.generate, args=("other", []), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), number
        if not was_interrupted:
            break
        number += 1
    assert number > 10


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    save_file(tiny.random_tensors(), tmp_path / "model.safetensors")
    tiny.tokenizer().save(tmp_path)
    yield tmp_path
    one_call._kept.close()


def test_generate_keeps_the_last_engine(model, xla_cache, monkeypatch):
    made = []
    make = jaxserve.llm.LLM.__init__

    def init(self, *args, **kwargs):
        made.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(jaxserve.llm.LLM, "__init__", init)
    engine = {name: value for name, value in tiny.ENGINE.items() if name != "seed"}

    def generate(prompts, **options):
        return jaxserve.generate(model, prompts, use_tqdm=False, compilation_cache_dir=xla_cache, **engine, **options)

    first = generate(["ab", [1, 2]], temperature=0, max_tokens=4)
    assert [output.prompt for output in first] == ["ab", None]
    again = generate(["ab"], temperature=0, max_tokens=4)
    assert again[0].text == first[0].text
    generate("ab", sampling_params=SamplingParams(max_tokens=2), scheduling_policy="fcfs")
    assert len(made) == 2  # other options: another engine, in place of the old one
    assert [llm.closed for llm in made] == [True, False]
    made[-1].close()
    generate("ab", max_tokens=1, scheduling_policy="fcfs")
    assert len(made) == 3
    with pytest.raises(ConfigError, match="unknown option.*max_tokenz .did you mean max_tokens"):
        generate("ab", max_tokenz=1)
    assert len(made) == 3


def test_generate_from_threads_never_closes_an_engine_in_use(model, xla_cache, monkeypatch):
    """Two models at once: the calls for one of them run together, then the other one's turn comes."""
    open_engines, most, lock = set(), [], threading.Lock()

    class Counted(jaxserve.LLM):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            open_engines.add(self)
            most.append(len(open_engines))

        def close(self):
            open_engines.discard(self)
            super().close()

        def generate(self, *args, **kwargs):
            with lock:
                assert self in open_engines
            return super().generate(*args, **kwargs)

    monkeypatch.setattr("jaxserve.one_call.LLM", Counted)
    engine = {name: value for name, value in tiny.ENGINE.items() if name != "seed"}

    def call(i: int) -> list[int]:
        outputs = jaxserve.generate(model, [[1, 2, i]], sampling_params=LONG, use_tqdm=False, **engine,
                                    compilation_cache_dir=xla_cache, max_waiting_requests=10 + i % 2)
        return outputs[0].outputs[0].token_ids

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(call, range(12)))
    assert [len(ids) for ids in results] == [100] * 12
    assert len(most) >= 2 and set(most) == {1}
