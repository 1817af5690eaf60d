"""LLM: the engine in your own process, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import jax

from jaxserve.config import EngineConfig, ResolvedConfig
from jaxserve.engine.async_engine import EngineThread
from jaxserve.engine.core import EngineCore, Request
from jaxserve.engine.detokenizer import TokenTexts
from jaxserve.engine.output_builder import RequestState
from jaxserve.engine.processor import ProcessedRequest, Processor, eos_token_ids
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError, EngineClosedError, RequestError
from jaxserve.outputs import CompletionOutput, RequestOutput, StreamEvent
from jaxserve.runtime.runner import Runner, resolve_dtype, resolve_max_model_len
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights.arrays import params_from_arrays
from jaxserve.weights.source import memory_model, open_model

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and its engine.

    Requests may come from any thread, and from coroutines through `astream`; they are batched together.

    Args:
        model: a Hugging Face hub id, a local Hugging Face directory, a `.gguf` file, an Orbax checkpoint
            directory made by `save_checkpoint`, or "demo".
        config: instead of `model`: the model's config.json as a dict; needs `params`.
        params: weights in memory: a DecoderParams pytree, a mapping from Hugging Face tensor names to
            arrays, or a Flax nnx module or state together with `name_map`.
        name_map: for nnx: dotted path of a parameter -> Hugging Face tensor name, or (name, function from
            the nnx array to the array as Hugging Face stores it, `[out, in]`).
        tokenizer: for weights in memory: a jaxserve Tokenizer or a directory with one; without it prompts are ids.
        options: see EngineConfig.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: before anything large is allocated, where possible.
    """

    def __init__(self, model: str | PathLike[str] | None = None, *, config: Mapping[str, Any] | None = None,
                 params: Any = None, name_map: Mapping[str, Any] | None = None, tokenizer: Any = None,
                 **options: Any):
        engine_config = EngineConfig.from_options(options)
        started = time.perf_counter()
        device = jax.devices()[0]
        if (model is None) == (config is None):
            raise ConfigError("give a model, or config= and params= for weights in memory")
        if (config is None) != (params is None):
            raise ConfigError("config= and params= go together")
        if config is None:
            assert model is not None
            if tokenizer is not None or name_map is not None:
                raise ConfigError("tokenizer= and name_map= are for weights in memory (config= and params=)")
            self._source = open_model(model, engine_config.max_model_len)
        else:
            self._source = memory_model(config, engine_config.max_model_len, tokenizer)
        source = self._source
        resolve_max_model_len(engine_config.max_model_len, source.spec)
        dtype = resolve_dtype(engine_config.dtype, source.dtype, device)
        loading = time.perf_counter()
        sharding = jax.sharding.SingleDeviceSharding(device)
        if params is None:
            placed = source.load(dtype, sharding)
        else:
            placed = params_from_arrays(params, source.spec, source.name_map, name_map, dtype, sharding)
        loaded = time.perf_counter()

        self.tokenizer = source.tokenizer
        valid_vocab = source.spec.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        runner = Runner(source.spec, placed, engine_config, valid_vocab, device)
        self.config: ResolvedConfig = runner.config
        self._dtype = dtype
        eos = eos_token_ids(self.tokenizer, source.generation_config, source.config, source.spec.vocab_size)
        self._processor = Processor(self.tokenizer, runner.config, eos,
                                    source.generation_config if engine_config.use_generation_config else {},
                                    engine_config.seed)
        self._texts = None if self.tokenizer is None else TokenTexts(self.tokenizer)
        if engine_config.compile_mode == "eager":
            _compile_all(runner)
        runner.reset_state()
        if engine_config.compile_mode == "eager":
            runner.mark_warm()
        self._core = EngineCore(Scheduler(runner.config), runner)
        self._runner = runner
        self._thread = EngineThread(self._core, on_close=runner.close)
        # The engine's thread knows nothing of this object, so dropping the last reference ends it.
        self._finalizer = weakref.finalize(self, self._thread.close)
        logger.info("%s ready in %.1f s: opened in %.1f, weights (%s) in %.1f, engine in %.1f", source.description,
                    time.perf_counter() - started, loading - started, dtype, loaded - loading,
                    time.perf_counter() - loaded)

    # -- offline

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
                 **sampling: Any) -> list[RequestOutput]:
        """Generates for one prompt or many and waits for all of them.

        Args:
            prompts: a text, a list of ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
            sampling_params: one for all prompts, or one each. Or give its fields as keywords.
            use_tqdm: show progress with tokens per second.

        Returns:
            One RequestOutput a prompt, in order. In a list an invalid prompt has `error` set, and the others
            are not disturbed.

        Raises:
            RequestError: the only prompt (not in a list) is invalid.
            KeyboardInterrupt: after an interrupt; the requests are aborted and the engine stays usable.
        """
        single = _is_single_prompt(prompts)
        prompt_list = [prompts] if single else list(prompts)
        params = _params_for(len(prompt_list), sampling_params, sampling)
        results = self._run([self._prepare(prompt, p) for prompt, p in zip(prompt_list, params, strict=True)],
                            use_tqdm=use_tqdm)
        if single and results[0].error is not None:
            raise results[0].error
        return results

    def chat(self, messages: Messages | Sequence[Messages],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
             use_tqdm: bool = True, **sampling: Any) -> list[RequestOutput]:
        """As `generate`, for one conversation or many, rendered by the model's chat template.

        Args:
            messages: dicts with "role" and "content", or a list of such conversations.
            add_generation_prompt: end the prompt where the assistant begins to speak.
            continue_final_message: the last message is the assistant's beginning, to be continued.
            chat_template: a Jinja template instead of the model's own.
            chat_template_kwargs: variables for the template.
        """
        single = bool(messages) and isinstance(messages[0], Mapping) or not messages
        conversations = [messages] if single else list(messages)
        params = _params_for(len(conversations), sampling_params, sampling)
        template = {"add_generation_prompt": add_generation_prompt and not continue_final_message,
                    "continue_final_message": continue_final_message, "chat_template": chat_template,
                    **(chat_template_kwargs or {})}
        prepared = [self._prepare_chat(m, p, template) for m, p in zip(conversations, params, strict=True)]
        results = self._run(prepared, use_tqdm=use_tqdm)
        if single and results[0].error is not None:
            raise results[0].error
        return results

    # -- streams

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
               **sampling: Any) -> Iterator[StreamEvent]:
        """Yields the increments of one request as they come; the last event carries the whole output.

        Closing the iterator early aborts the request.

        Raises:
            RequestError: the request is invalid (at the call, not at the first event).
        """
        return self._stream(self._processor.process(prompt, _one_params(sampling_params, sampling)))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None, *,
                    chat_template_kwargs: Mapping[str, Any] | None = None, **sampling: Any) -> Iterator[StreamEvent]:
        """As `stream`, for one conversation."""
        ids = self._chat_ids(messages, {"add_generation_prompt": True, **(chat_template_kwargs or {})})
        return self._stream(self._processor.process(ids, _one_params(sampling_params, sampling)))

    async def astream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                      **sampling: Any) -> AsyncIterator[StreamEvent]:
        """As `stream`, for coroutines. Cancelling or closing it aborts the request."""
        processed = self._processor.process(prompt, _one_params(sampling_params, sampling))
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[StreamEvent] = asyncio.Queue()

        def deliver(event: StreamEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        request_id = self._submit(processed, deliver, patient=False)
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.output is not None
                if event.output is not None and event.output.error is not None:
                    raise event.output.error
                yield event
        finally:
            if not finished:
                self._thread.abort(request_id)

    def _stream(self, processed: ProcessedRequest) -> Iterator[StreamEvent]:
        events: queue.SimpleQueue[StreamEvent] = queue.SimpleQueue()
        request_id = self._submit(processed, events.put, patient=False)

        def iterate() -> Iterator[StreamEvent]:
            finished = False
            try:
                while not finished:
                    event = events.get()
                    finished = event.output is not None
                    if event.output is not None and event.output.error is not None:
                        raise event.output.error
                    yield event
            finally:
                if not finished:
                    self._thread.abort(request_id)

        return iterate()

    # -- weights, cache, life cycle

    def update_params(self, params: Any, name_map: Mapping[str, Any] | None = None) -> None:
        """Swaps the weights between two steps, without compiling, and drops the prefix cache.

        Args:
            params, name_map: as for the constructor. Structure, shapes and shardings must be the engine's;
                of a DecoderParams also the dtype, the other kinds are converted.

        Raises:
            ConfigError, CheckpointError: naming the first leaf that differs; the old weights stay.
        """
        self._check_open()
        source = self._source
        sharding = self._runner.params.embed.sharding
        placed = params_from_arrays(params, source.spec, source.name_map, name_map, self._dtype, sharding)

        def swap() -> None:
            self._runner.update_params(placed)
            self._core.scheduler.reset_prefix_cache()

        self._thread.call(swap)

    def save_checkpoint(self, directory: str | PathLike[str]) -> None:
        """Writes weights, config and tokenizer as an Orbax checkpoint that `LLM(directory)` opens.

        Raises:
            CheckpointError: the directory exists and is not empty.
        """
        self._check_open()
        self._source.save(self._runner.params, directory)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests go on."""
        self._thread.call(self._core.scheduler.reset_prefix_cache)

    def metrics(self) -> dict[str, Any]:
        """Counters since start: steps, padding, compilations, prefix hits, preemptions, pages."""
        def read() -> dict[str, Any]:
            scheduler = self._core.scheduler
            stats = scheduler.pool.stats
            return {**self._runner.metrics(), "prefix_query_tokens": stats.query_tokens,
                    "prefix_hit_tokens": stats.hit_tokens, "prefix_evictions": stats.evictions,
                    "preemptions": scheduler.num_preemptions, "running": scheduler.num_running,
                    "waiting": scheduler.num_waiting, "pages_total": self.config.num_pages - 1,
                    "pages_free": scheduler.pool.num_free}
        return self._thread.call(read)

    def close(self) -> None:
        """Aborts what runs and frees the device's memory. The engine cannot be used afterwards."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return self._thread.closed

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed")

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> ProcessedRequest | RequestOutput:
        try:
            return self._processor.process(prompt, params)
        except RequestError as error:
            return _failed(prompt, error)

    def _prepare_chat(self, messages: Messages, params: SamplingParams,
                      template: Mapping[str, Any]) -> ProcessedRequest | RequestOutput:
        try:
            return self._processor.process(self._chat_ids(messages, template), params)
        except RequestError as error:
            return _failed("", error)

    def _chat_ids(self, messages: Messages, template: Mapping[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer, so it cannot chat", "messages")
        return self.tokenizer.apply_chat_template(messages, **template)

    def _submit(self, processed: ProcessedRequest, on_event, patient: bool) -> str:
        request_id = uuid.uuid4().hex
        self._thread.submit(Request(RequestState(request_id, processed, self._texts), on_event, patient))
        return request_id

    def _run(self, prepared: list[ProcessedRequest | RequestOutput], use_tqdm: bool) -> list[RequestOutput]:
        """Runs what is valid; waits for all."""
        self._check_open()
        results: list[RequestOutput | None] = [None] * len(prepared)
        done: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
        tokens = _TokenCount()
        running: dict[int, str] = {}

        def listener(index: int):
            def on_event(event: StreamEvent) -> None:
                tokens.count += len(event.token_ids)
                if event.output is not None:
                    done.put((index, event.output))
            return on_event

        bar = _progress_bar(len(prepared), use_tqdm)
        try:
            for index, item in enumerate(prepared):
                if isinstance(item, RequestOutput):
                    results[index] = item
                    bar.update(1)
                else:
                    running[index] = self._submit(item, listener(index), patient=True)
            started = time.perf_counter()
            while running:
                try:
                    index, output = done.get(timeout=0.2)
                except queue.Empty:
                    pass
                else:
                    results[index] = output
                    del running[index]
                    bar.update(1)
                seconds = time.perf_counter() - started
                bar.set_postfix_str(f"{tokens.count / seconds:.1f} tok/s", refresh=False)
        except BaseException:
            # An interrupt, usually. Wait until the engine has let go, so that the next call starts clean.
            for request_id in running.values():
                self._thread.abort(request_id)
            if not self.closed:
                self._thread.call(lambda: None)
            raise
        finally:
            bar.close()
        return [result for result in results if result is not None]


class _TokenCount:
    """Written by the engine's thread, read by the caller's."""

    def __init__(self) -> None:
        self.count = 0


def generate(model: str | PathLike[str], prompts: Prompt | Sequence[Prompt], *,
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True,
             **options: Any) -> list[RequestOutput]:
    """Loads a model and generates, in one call. The engine is kept for the next call with the same model
    and engine options, so a second notebook cell starts at once; another model replaces it.

    Args:
        model: see LLM.
        prompts: see LLM.generate.
        options: engine options (EngineConfig) and sampling options (SamplingParams) by name. `seed` is the
            request's.
    """
    engine_names = set(EngineConfig.__dataclass_fields__) - set(SamplingParams.__dataclass_fields__)
    engine_options = {name: options.pop(name) for name in list(options) if name in engine_names}
    unknown = sorted(set(options) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown option(s) {', '.join(unknown)}; engine options: {', '.join(sorted(engine_names))}; "
                          f"sampling options: {', '.join(sorted(SamplingParams.__dataclass_fields__))}")
    EngineConfig.from_options(engine_options)
    if sampling_params is None or options:
        sampling_params = _one_params(sampling_params, options)
    with _kept_lock:
        key = (str(model), tuple(sorted(engine_options.items())))
        global _kept
        if _kept is None or _kept[0] != key or _kept[1].closed:
            if _kept is not None:
                _kept[1].close()
                _kept = None
            _kept = (key, LLM(model, **engine_options))
        llm = _kept[1]
    return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)


_kept: tuple[Any, LLM] | None = None
_kept_lock = threading.Lock()


def _compile_all(runner: Runner) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=len(runner.buckets) + 1, desc="Compiling", unit="program", leave=False) as bar:
        runner.compile(on_done=lambda _: bar.update(1))


def _progress_bar(total: int, show: bool):
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Generating", unit="req", disable=not show, dynamic_ncols=True)


def _is_single_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return bool(prompts) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts)


def _check_no_both(params: Any, sampling: dict[str, Any]) -> None:
    if params is not None and sampling:
        raise RequestError(f"give sampling_params or single sampling options ({', '.join(sorted(sampling))}), not both",
                           "sampling_params")


def _one_params(params: Any, sampling: dict[str, Any]) -> SamplingParams:
    _check_no_both(params, sampling)
    if params is not None:
        return params
    unknown = sorted(set(sampling) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise RequestError(f"unknown sampling option(s) {', '.join(unknown)}; known: "
                           f"{', '.join(sorted(SamplingParams.__dataclass_fields__))}", unknown[0])
    return SamplingParams(**sampling)


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None,
                sampling: dict[str, Any]) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [_one_params(params, sampling)] * count
    _check_no_both(params, sampling)
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one each",
                           "sampling_params")
    return list(params)


def _failed(prompt: Any, error: RequestError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id=uuid.uuid4().hex, prompt=text, prompt_token_ids=[],
                         outputs=[CompletionOutput(index=0, finish_reason="error")], error=error)
