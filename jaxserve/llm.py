"""LLM: the engine in your own process, for scripts and notebooks."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax

from jaxserve import offline
from jaxserve.config import EngineConfig, ResolvedConfig
from jaxserve.engine.async_engine import EngineThread
from jaxserve.engine.core import EngineCore, Request, StepStats
from jaxserve.engine.detokenizer import TokenTexts
from jaxserve.engine.output_builder import RequestState
from jaxserve.engine.processor import ProcessedRequest, Processor, Prompt, eos_token_ids
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError, EngineClosedError, RequestError
from jaxserve.inputs import (
    listed_conversations,
    listed_prompts,
    new_request_id,
    one_conversation,
    one_params,
    one_prompt,
    params_for,
    progress_bar,
)
from jaxserve.models.params import DecoderParams
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.runtime.devices import default_device
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.host_memory import LOGITS_WORTH_KEEPING, give_back, keep_large_blocks
from jaxserve.runtime.jax_settings import own_settings
from jaxserve.runtime.memory import memory_errors
from jaxserve.runtime.planning import plan_engine, resolve_dtype
from jaxserve.runtime.programs import EnginePlan
from jaxserve.runtime.runner import Runner
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights.arrays import params_from_arrays
from jaxserve.weights.source import ModelSource, memory_model, open_model

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

# What `chat` does with messages before they are a prompt.
_TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template",
                     "chat_template_kwargs")


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
        source = self._source = _open_source(model, config, params, name_map, tokenizer, engine_config.max_model_len)
        device = default_device()
        self._dtype = resolve_dtype(engine_config.dtype, source.dtype, device)
        self.tokenizer = source.tokenizer
        on_device = isinstance(params, DecoderParams) and isinstance(params.embed, jax.Array)
        plan = plan_engine(source.spec, self._dtype, engine_config, source.valid_vocab, device,
                           weights_loaded=on_device)
        self.config: ResolvedConfig = plan.config
        self.kv_cache_dtype = engine_config.kv_cache_dtype
        eos = eos_token_ids(self.tokenizer, source.generation_config, source.config, source.spec.vocab_size)
        self._processor = Processor(self.tokenizer, plan.config, eos,
                                    source.generation_config if engine_config.use_generation_config else {},
                                    engine_config.seed)
        executables = Executables(plan.lower, engine_config.compilation_cache_dir)
        if device.platform == "cpu" and plan.logits_bytes > LOGITS_WORTH_KEEPING:
            keep_large_blocks()
        opened = time.perf_counter()
        source.check()
        # Before the weights are loaded, so that what XLA needs meanwhile does not come on top of them.
        if engine_config.compile_mode == "eager":
            with memory_errors("compiling"):
                _compile_all(plan, executables)
        compiled = time.perf_counter()
        formats = plan.weight_formats
        with memory_errors("loading the weights"):
            if params is None:
                placed = source.load(self._dtype, formats)
            else:
                placed = params_from_arrays(params, source.spec, source.name_map, name_map, self._dtype, formats)
        give_back()  # what reading and dequantising took
        loaded = time.perf_counter()

        runner = self._runner = Runner(plan, placed, executables)
        self._texts = None if self.tokenizer is None else TokenTexts(self.tokenizer)
        with own_settings(), memory_errors("making the KV pool and the sequences' state"):
            runner.reset_state()
        if engine_config.compile_mode == "eager":
            runner.mark_warm()
        self._core = EngineCore(Scheduler(plan.config), runner)
        self._thread = EngineThread(self._core, on_close=runner.close, settings=own_settings)
        # The engine's thread knows nothing of this object, so dropping the last reference ends it.
        self._finalizer = weakref.finalize(self, self._thread.close)
        logger.info("%s ready in %.1f s: opened in %.1f, compiled in %.1f, weights (%s) in %.1f, engine in %.1f",
                    source.description, time.perf_counter() - started, opened - started, compiled - opened,
                    self._dtype, loaded - compiled, time.perf_counter() - loaded)

    # -- offline

    def generate(self, prompts: Prompt | Iterable[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
                 **sampling: Any) -> list[RequestOutput]:
        """Generates for one prompt or many and waits for all of them.

        Args:
            prompts: a text, a list of ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
            sampling_params: one for all prompts, or one each. Or give its fields as keywords.
            use_tqdm: show progress with tokens per second.

        Returns:
            One RequestOutput a prompt, in order. In a list a prompt that is invalid, or fails later, has `error`
            set, and the others are not disturbed.

        Raises:
            RequestError: the only prompt (not in a list) is invalid, or `sampling_params` do not fit the prompts.
            EngineError: the only prompt (not in a list) failed.
            KeyboardInterrupt: after an interrupt; the requests are aborted and the engine stays usable.
        """
        items, single = listed_prompts(prompts)
        each = self._params_for(items, sampling_params, sampling)
        return offline.run(self, items, each, self._processor.process, single=single, use_tqdm=use_tqdm)

    async def agenerate(self, prompts: Prompt | Iterable[Prompt],
                        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                        use_tqdm: bool = True, **sampling: Any) -> list[RequestOutput]:
        """As `generate`, for coroutines: the event loop runs on meanwhile. Cancelling it aborts the requests."""
        items, single = listed_prompts(prompts)
        each = self._params_for(items, sampling_params, sampling)
        return await offline.arun(self, items, each, self._processor.process, single=single, use_tqdm=use_tqdm)

    def chat(self, messages: Messages | Iterable[Messages],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             add_generation_prompt: bool | None = None, continue_final_message: bool = False,
             tools: Sequence[Mapping[str, Any]] | None = None, chat_template: str | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None, use_tqdm: bool = True,
             **sampling: Any) -> list[RequestOutput]:
        """As `generate`, for one conversation or many, rendered by the model's chat template.

        Args:
            messages: dicts with "role" and "content", or a list of such conversations.
            add_generation_prompt: end the prompt where the assistant begins to speak. Default: yes, unless
                continue_final_message.
            continue_final_message: the last message is the assistant's beginning, to be continued.
            tools: JSON schemas of functions, for templates that know them.
            chat_template: a Jinja template instead of the model's own, or the name of one of its own.
            chat_template_kwargs: variables for the template.
        """
        template = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
                    "tools": tools, "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        items, single = listed_conversations(messages)
        process = functools.partial(self.process_chat, **template)
        each = self._params_for(items, sampling_params, sampling)
        return offline.run(self, items, each, process, single=single, use_tqdm=use_tqdm)

    async def achat(self, messages: Messages | Iterable[Messages],
                    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                    use_tqdm: bool = True, **options: Any) -> list[RequestOutput]:
        """As `chat`, with its options, for coroutines; see `agenerate`."""
        items, single = listed_conversations(messages)
        process = functools.partial(self.process_chat, **_take_template_options(options))
        each = self._params_for(items, sampling_params, options)
        return await offline.arun(self, items, each, process, single=single, use_tqdm=use_tqdm)

    # -- streams

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
               **sampling: Any) -> Generator[StreamEvent, None, None]:
        """Yields the increments of one request as they come; the last event carries the whole output.

        The request starts at the call. Closing the iterator, or dropping it, aborts the request.

        Raises:
            RequestError: the request is invalid (at the call, not at the first event).
            QueueFullError, EngineError: instead of an event.
        """
        return offline.stream(self, self._process(prompt, sampling_params, sampling))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None,
                    **options: Any) -> Generator[StreamEvent, None, None]:
        """As `stream`, for one conversation; options as for `chat`."""
        return offline.stream(self, self._process_chat(messages, sampling_params, options))

    def astream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                **sampling: Any) -> AsyncGenerator[StreamEvent, None]:
        """As `stream`, for coroutines: the request is checked, in another thread, and starts when the first event is
        awaited, which raises what `stream` does. Cancelling or closing the iterator aborts it."""
        return offline.astream(self, functools.partial(self._process, prompt, sampling_params, sampling))

    def astream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None,
                     **options: Any) -> AsyncGenerator[StreamEvent, None]:
        """As `astream`, for one conversation; options as for `chat`."""
        return offline.astream(self, functools.partial(self._process_chat, messages, sampling_params, options))

    # -- for servers: a request in steps, for callers that must not wait

    def process(self, prompt: Prompt, params: SamplingParams) -> ProcessedRequest:
        """Checks a request against the model and the engine. Raises RequestError."""
        return self._processor.process(prompt, params)

    def process_chat(self, messages: Messages, params: SamplingParams, **template: Any) -> ProcessedRequest:
        """As `process`, for one conversation; `template` are the options of `chat` for rendering it."""
        return self._processor.process(self.chat_token_ids(messages, **template), params)

    def submit(self, processed: ProcessedRequest, on_event: Callable[[StreamEvent], None],
               request_id: str | None = None, *, patient: bool = False) -> str:
        """Starts a request and returns its id at once. `on_event` is called in the engine's thread, with the
        request's errors too, and must not block; if the engine ends just now, it may be called in this one. A `patient`
        request waits for room in the queue, where others end with QueueFullError. Raises EngineClosedError."""
        request_id = request_id or new_request_id()
        self._thread.submit(Request(RequestState(request_id, processed, self._texts), on_event, patient))
        return request_id

    def abort(self, request_id: str) -> None:
        """Ends a request within a step. No effect on one that has ended."""
        self._thread.abort(request_id)

    def settle(self) -> None:
        """Returns when the engine's thread has done what it was asked for so far. Raises EngineClosedError."""
        self._thread.call(lambda: None)

    def token_piece(self, token_id: int) -> str | bytes:
        """What an id adds to a text: its text, or its bytes if they are not whole characters."""
        return "" if self._texts is None else self._texts.piece(token_id)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls `function` in the engine's thread, after what was submitted before. Raises EngineClosedError."""
        self._thread.call_soon(function)

    def on_step(self, function: Callable[[StepStats], None]) -> None:
        """Calls `function`, which must be quick and must not raise, in the engine's thread after each step."""
        self._core.step_listeners.append(function)

    def on_end(self, function: Callable[[BaseException | None], None]) -> None:
        """Calls `function` in the engine's thread when the engine has ended, with the fault if it was one; at once and
        in this thread if it has ended already."""
        self._thread.on_end(function)

    # -- weights, cache, life cycle

    def update_params(self, params: Any, name_map: Mapping[str, Any] | None = None) -> None:
        """Swaps the weights between two steps, without compiling, and drops the prefix cache.

        Args:
            params, name_map: as for the constructor. Structure, shapes and shardings must be the engine's;
                of a DecoderParams also the dtype, the other kinds are converted. The jax arrays of a DecoderParams
                are kept, not copied (those of the constructor too; on TPUs the large ones are copied into the order
                that products read): the engine never donates them, so they stay yours to read, but they must not be
                donated or deleted while the engine uses them. A train step that donates its parameters must be given
                others: `jax.tree.map(jnp.copy, params)`.

        Raises:
            ConfigError, CheckpointError: naming the first leaf that differs; the old weights stay.
        """
        self._check_open()
        source = self._source
        placed = params_from_arrays(params, source.spec, source.name_map, name_map, self._dtype,
                                    self._runner.plan.weight_formats)

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
        """Counters since start: steps, padding, compilations, prefix hits, preemptions, pages, faults.

        Of the pages, `pages_cached` are among the `pages_free`: what they hold may still be of use.
        """
        def read() -> dict[str, Any]:
            scheduler = self._core.scheduler
            stats = scheduler.pool.stats
            return {**self._runner.metrics(), "prefix_query_tokens": stats.query_tokens,
                    "prefix_hit_tokens": stats.hit_tokens, "prefix_evictions": stats.evictions,
                    "preemptions": scheduler.num_preemptions, "running": scheduler.num_running,
                    "waiting": scheduler.num_waiting, "page_size": self.config.page_size,
                    "pages_total": self.config.num_pages - 1, "pages_free": scheduler.pool.num_free,
                    "pages_cached": scheduler.pool.num_cached, "failed_steps": self._core.num_failed_steps,
                    "not_finite": self._core.num_not_finite}
        return self._thread.call(read)

    def close(self) -> None:
        """Aborts what runs and frees the device's memory. The engine cannot be used afterwards."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return self._thread.closed

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        return self._source.config

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a text."""
        return self._processor.eos_ids

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """What requests get for temperature, top_k, top_p, min_p and repetition_penalty if they name none."""
        return self._processor.defaults

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _params_for(self, items: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
                    sampling: dict[str, Any]) -> list[SamplingParams]:
        self._check_open()
        return params_for(len(items), sampling_params, sampling)

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed")

    def _process(self, prompt: Prompt, sampling_params: SamplingParams | None,
                 sampling: dict[str, Any]) -> ProcessedRequest:
        return self._processor.process(one_prompt(prompt), one_params(sampling_params, sampling))

    def _process_chat(self, messages: Messages, sampling_params: SamplingParams | None,
                      options: dict[str, Any]) -> ProcessedRequest:
        template = _take_template_options(options)
        params = one_params(sampling_params, options)
        return self.process_chat(one_conversation(messages), params, **template)

    def token_ids(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = True) -> list[int]:
        """The ids of a text. Raises RequestError: there is no tokenizer, or the text is too long (see
        Processor.encode)."""
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; send token ids", "prompt")
        return self._processor.encode(text, add_special_tokens, must_fit=must_fit)

    def chat_token_ids(self, messages: Messages, *, chat_template_kwargs: Mapping[str, Any] | None = None,
                       must_fit: bool = True, **template: Any) -> list[int]:
        """The prompt that a conversation makes; `template` are the options of `chat`. Raises RequestError; for
        `must_fit` see Processor.encode."""
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer, so it cannot chat", "messages")
        variables = dict(chat_template_kwargs or {})
        misplaced = sorted(variables.keys() & {"messages", *_TEMPLATE_OPTIONS})
        if misplaced:
            raise RequestError(f"{', '.join(misplaced)} cannot be given as variables of the chat template",
                               "chat_template_kwargs")
        self._processor.check_conversation([messages, template, variables])
        text = self.tokenizer.render_chat(messages, **template, **variables)
        return self._processor.encode(text, add_special_tokens=False, param="messages", must_fit=must_fit)


def _take_template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of `chat` for rendering a conversation from the others, and returns them."""
    return {name: options.pop(name) for name in _TEMPLATE_OPTIONS if name in options}


def _open_source(model: str | PathLike[str] | None, config: Mapping[str, Any] | None, params: Any,
                 name_map: Mapping[str, Any] | None, tokenizer: Any, max_model_len: int | None) -> ModelSource:
    if (model is None) == (config is None):
        raise ConfigError("give a model, or config= and params= for weights in memory")
    if (config is None) != (params is None):
        raise ConfigError("config= and params= go together")
    if config is not None:
        return memory_model(config, max_model_len, tokenizer)
    if not isinstance(model, str | PathLike):
        raise ConfigError(f"model must be the name or path of a model, got {model!r:.80}")
    if tokenizer is not None or name_map is not None:
        raise ConfigError("tokenizer= and name_map= are for weights in memory (config= and params=)")
    return open_model(model, max_model_len)


def _compile_all(plan: EnginePlan, executables: Executables) -> None:
    # The largest first: what stays of the others lies in the gaps that it leaves.
    with progress_bar(len(plan.programs), desc="Preparing", unit="program", leave=False) as bar:
        executables.compile_all(reversed(plan.programs), lambda _: bar.update(1))
