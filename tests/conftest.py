"""Settings of the whole suite, and a stand-in for `jaxserve.LLM` for the tests of what surrounds it."""

from __future__ import annotations

import os

# Before jax is imported anywhere. Tests need no accelerator and never reach for a model hub.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The interpreter of GPU kernels runs each warpgroup as a program, and each needs threads of XLA's: with the two of a
# two-core machine jax 0.10 takes ten times as long, and 0.12 may wait for ever.
os.environ.setdefault("PJRT_NPROC", "16")

import types  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from jaxserve.config import EngineConfig  # noqa: E402
from jaxserve.errors import RequestError  # noqa: E402
from jaxserve.outputs import CompletionOutput, RequestOutput, RequestTimings, StreamEvent  # noqa: E402

# A shared machine makes single examples slow now and then; a fixed choice of examples makes a red run
# repeatable.
hypothesis.settings.register_profile("jaxserve", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxserve")


class FakeLLM:
    """Answers every prompt with "word word ..." and keeps what it was asked."""

    instances: list[FakeLLM]
    vocab_size = 50_000
    interrupt_after: int | None = None  # stream: raise KeyboardInterrupt after this many events

    def __init__(self, model: str, **options):
        self.options = EngineConfig.from_options(options)
        self.model = model
        self.config = types.SimpleNamespace(vocab_size=self.vocab_size, max_model_len=1024)
        self.calls: list[tuple] = []
        self.closed = False
        self.aborted = 0
        type(self).instances.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self):
        self.closed = True

    def _answer(self, prompt, params) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = list(range(10)) if not isinstance(prompt, dict) else prompt["prompt_token_ids"]
        if text == "too long":
            error = RequestError("the prompt has 9999 tokens, at most 1024 fit; shorten it")
            return RequestOutput("0", text, ids, error=error)
        count = params.max_tokens or 4
        completions = [CompletionOutput(i, " word" * count, list(range(count)), "length") for i in range(params.n)]
        return RequestOutput("0", text, ids, completions, num_cached_tokens=8, timings=RequestTimings(0.0, 0.5, 1.5))

    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        self.calls.append(("generate", prompts, sampling_params))
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [self._answer(prompt, params) for prompt, params in zip(prompts, each)]

    def chat(self, messages, sampling_params, *, use_tqdm=True):
        self.calls.append(("chat", messages, sampling_params))
        return [self._answer({"prompt_token_ids": list(range(20))}, sampling_params) for _ in messages]

    def _stream(self, prompt, params):
        output = self._answer(prompt, params)
        if output.error is not None:
            raise output.error
        count = len(output.outputs[0].token_ids)
        try:
            for i in range(count):
                if i == self.interrupt_after:
                    raise KeyboardInterrupt
                last = i == count - 1
                yield StreamEvent(0, " word", [i], finish_reason="length" if last else None,
                                  output=output if last else None)
        except (GeneratorExit, KeyboardInterrupt):
            self.aborted += 1
            raise

    def stream(self, prompt, sampling_params):
        self.calls.append(("stream", prompt, sampling_params))
        return self._stream(prompt, sampling_params)

    def stream_chat(self, messages, sampling_params):
        self.calls.append(("stream_chat", messages, sampling_params))
        return self._stream(messages[-1]["content"], sampling_params)

    def metrics(self):
        calls = len(self.calls)
        return {"steps": 10 * calls, "token_rows": 300 * calls, "token_rows_padded": 400 * calls, "executables": 3,
                "compile_seconds": {}, "kv_pool_bytes": 10**6}


@pytest.fixture
def fake_llm(monkeypatch) -> type[FakeLLM]:
    """`jaxserve.LLM` is a FakeLLM of this test's own; returned is the class, with its `instances`."""
    import jaxserve

    class Fake(FakeLLM):
        instances: list[FakeLLM] = []

    monkeypatch.setitem(vars(jaxserve), "LLM", Fake)  # no setattr: it would import the real one first
    return Fake


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory with a very small random model and a tokenizer of bytes."""
    from tests.tiny_model import write_tiny_model

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return directory
