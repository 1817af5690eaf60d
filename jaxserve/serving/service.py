"""The one engine as coroutines see it: what the HTTP and the gRPC face share.

The engine's thread never waits for anything here. Its events go into an outbox that the event loop empties in
one go, however many requests a step has served, and from there to each request's own mailbox.

Text work (tokens, chat templates) runs in worker threads. Everything else belongs to the event loop in which
`start` was called.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from jaxserve.config import ResolvedConfig
from jaxserve.engine.core import StepStats
from jaxserve.engine.processor import ProcessedRequest, Prompt
from jaxserve.errors import EngineClosedError, JaxserveError, QueueFullError, RequestError
from jaxserve.llm import LLM, Messages
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams, check_token_ids
from jaxserve.serving.incoming import CURRENT
from jaxserve.serving.request_stream import DeadlineExceededError, RequestStream, UnavailableError
from jaxserve.text_length import num_chars
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_MAX_WAITING_TOKENS = 1 << 20
_TEXT_THREADS = 2
_LONG_CHARS = 1 << 16  # a text of this length is encoded in some hundredths of a second
_MOST_IDS = 1 << 22  # to be decoded at a time: half a second
_RATE_SECONDS = 10.0
_SNAPSHOT_PATIENCE = 1.0  # seconds; a step that compiles takes longer, and then the last numbers are given


class State(enum.Enum):
    STARTING = "starting"  # until everything that a request needs is warm
    READY = "ready"
    DRAINING = "draining"  # what runs may end, nothing new is taken
    FAILED = "failed"  # the engine has ended


class DuplicateRequestError(RequestError):
    """A request of this id is running."""


class Observer(Protocol):
    """Watches a service, for metrics and traces. Called in the event loop, but for `step`; must be quick and must not
    raise."""

    def step(self, stats: StepStats) -> None:
        """The engine made a step. Called in its thread."""

    def rejected(self, stream: RequestStream, reason: str) -> None:
        """A request was refused: "queue_full", "unavailable", "invalid", "deadline"."""

    def increment(self, stream: RequestStream, event: StreamEvent, at: float) -> None:
        """The engine made an increment of a completion, at `at` (time.perf_counter). `stream.last_events` holds the
        time of the one before."""

    def finished(self, stream: RequestStream, output: RequestOutput, at: float) -> None:
        """A request has ended; if it was aborted, `stream.abort_cause` says by whom."""


class Rate:
    """Counts a second, over the last ten seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()  # of tenths of a second, by their beginning

    def add(self, count: int, at: float) -> None:
        if self._counts and at - self._counts[-1][0] < 0.1:
            begin, before = self._counts.pop()
            self._counts.append((begin, before + count))
        else:
            self._forget(at)
            self._counts.append((at, count))

    def value(self, now: float) -> float:
        self._forget(now)
        return sum(count for _, count in self._counts) / _RATE_SECONDS

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - _RATE_SECONDS:
            self._counts.popleft()


class Service:
    """An engine and who may use it now. Faces may be opened before there is an engine: what needs one raises
    UnavailableError until `start`.

    Args:
        model_name: what clients call the model.
        max_waiting_tokens: most prompt tokens of all requests that wait, from their arrival until their first token;
            more are refused with QueueFullError, but one request alone may have more. None: nothing is refused for
            want of room, neither by this nor by the engine's `max_waiting_requests`.
    """

    def __init__(self, *, model_name: str, max_waiting_tokens: int | None = DEFAULT_MAX_WAITING_TOKENS,
                 observers: Sequence[Observer] = ()):
        self.model_name = model_name
        self.created = int(time.time())
        self._engine: LLM | None = None
        self._max_waiting_tokens = max_waiting_tokens
        self._observers = observers
        self._rate = Rate()
        self._state = State.STARTING
        self._listeners: list[Callable[[State], None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._text_pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="jaxserve-text")
        # Texts of megabytes wait for each other only, and take one processor and one text's memory at a time.
        self._long_text_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-long-text")
        self._streams: dict[str, RequestStream] = {}  # until the engine has let go of them
        self._waiting: dict[str, int] = {}  # request id -> prompt tokens, 0 while they are being made
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: deque[tuple[RequestStream, StreamEvent | None, float]] = deque()
        self._collecting = False
        self._snapshot: dict[str, Any] = {}
        self._snapshot_task: asyncio.Task[None] | None = None

    # -- life cycle

    async def start(self, llm: LLM) -> None:
        """Runs what a request runs once, so that no client waits for imports or compilations; then the service
        is ready.

        Args:
            llm: the engine; the caller closes it, after `drain`.

        Raises:
            EngineError: the first token could not be made.
        """
        self._loop = asyncio.get_running_loop()
        self._engine = llm
        self._llm.on_end(self._engine_ended)
        self._llm.on_step(self._stepped)
        await self.run_text(self._warm_up)
        self._snapshot = await asyncio.to_thread(self._llm.metrics)
        if self._state is State.STARTING:
            self._set_state(State.READY)

    def _warm_up(self) -> None:
        if self.tokenizer is not None and self.tokenizer.chat_templates:
            with contextlib.suppress(RequestError):  # a template that refuses this message is no fault
                self.tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        self._llm.generate([0], SamplingParams(max_tokens=1), use_tqdm=False)
        self._llm.reset_prefix_cache()

    async def drain(self, grace: float) -> bool:
        """Takes no more requests and waits for those that run; after `grace` seconds they are aborted. Whether all
        ended by themselves."""
        if self._state is not State.FAILED:
            self._set_state(State.DRAINING)
        if await self.idle(grace):
            return True
        logger.warning("aborting %d requests that have not ended within %g s", len(self._streams), grace)
        for stream in list(self._streams.values()):
            stream.abort("drain")
        if self._state is not State.FAILED:
            await self._idle.wait()
        return False

    def close(self) -> None:
        """Ends the worker threads."""
        for pool in (self._text_pool, self._long_text_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _llm(self) -> LLM:
        if self._engine is None:
            raise UnavailableError(f"the service is {self._state.value}")
        return self._engine

    @property
    def state(self) -> State:
        return self._state

    def add_listener(self, on_state: Callable[[State], None]) -> None:
        """Calls `on_state` in the event loop with the state, now and whenever it changes."""
        self._listeners.append(on_state)
        on_state(self._state)

    def _set_state(self, state: State) -> None:
        if state is not self._state:
            logger.info("service: %s", state.value)
            self._state = state
            for listener in self._listeners:
                listener(state)

    def _stepped(self, stats: StepStats) -> None:  # in the engine's thread
        for observer in self._observers:
            observer.step(stats)

    def _engine_ended(self, fault: BaseException | None) -> None:  # in the engine's thread
        with contextlib.suppress(RuntimeError):  # the loop has closed: so has the service
            self._loop.call_soon_threadsafe(self._set_state, State.FAILED)

    # -- requests

    async def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                       deadline: float | None = None) -> RequestStream:
        """Starts a request and returns when the engine has taken it.

        Args:
            prompt: see LLM.stream.
            request_id: default: a new one.
            deadline: seconds from now, after which the request is aborted.

        Raises:
            RequestError: the request is invalid (DuplicateRequestError: its id is in use).
            QueueFullError: too much is waiting; try again later.
            UnavailableError, EngineError: the service takes no requests.
        """
        return await self._start(lambda: self._llm.process(prompt, params), num_chars(prompt, _LONG_CHARS),
                                 "text_completion", params, request_id, deadline)

    async def chat(self, messages: Messages, params: SamplingParams, *, template: Mapping[str, Any] | None = None,
                   request_id: str | None = None, deadline: float | None = None) -> RequestStream:
        """As `generate`, for a conversation. `template`: the options of LLM.chat for rendering it."""
        return await self._start(lambda: self._llm.process_chat(messages, params, **(template or {})),
                                 num_chars([messages, template], _LONG_CHARS), "chat", params, request_id, deadline)

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets an event with "abort". False if no such request runs."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.abort("abort")
        return True

    def end_request(self, request_id: str) -> None:
        """Tells the engine to end a request within a step."""
        self._llm.abort(request_id)

    async def _start(self, process: Callable[[], ProcessedRequest], size: int, operation: str,
                     params: SamplingParams, request_id: str | None, deadline: float | None) -> RequestStream:
        request_id = request_id or self._new_id()
        stream = RequestStream(self, request_id, operation, params)
        try:
            self._check_admission(request_id)
            self._waiting[request_id] = 0
            try:
                async with asyncio.timeout(deadline):
                    stream.processed = await self.run_text(process, size)
                self._check_tokens(len(stream.prompt_token_ids))
                self._check_state()  # it may have changed meanwhile
                self._submit(stream, deadline)
            except BaseException:
                stream.let_go = True
                self._waiting.pop(request_id, None)
                raise
            await stream.admission()
        except TimeoutError:
            self._rejected(stream, "deadline")
            raise DeadlineExceededError("the deadline came before the request began") from None
        except JaxserveError as error:
            self._rejected(stream, "invalid" if isinstance(error, RequestError) else
                           "queue_full" if isinstance(error, QueueFullError) else "unavailable")
            raise
        return stream

    def _new_id(self) -> str:
        """Two requests may have the same id in HTTP, and one may be several here."""
        call, unique = CURRENT.get(), uuid.uuid4().hex
        return unique if call is None or call.request_id is None else f"{call.request_id}-{unique[:8]}"

    def _rejected(self, stream: RequestStream, reason: str) -> None:
        for observer in self._observers:
            observer.rejected(stream, reason)

    def _check_state(self) -> None:
        if self._state is not State.READY:
            raise UnavailableError(f"the service is {self._state.value}")

    def _check_admission(self, request_id: str) -> None:
        self._check_state()
        if request_id in self._streams or request_id in self._waiting:
            raise DuplicateRequestError(f"a request with the id {request_id!r} is running; use another id",
                                        "request_id")

    def _check_tokens(self, num_tokens: int) -> None:
        waiting, limit = self.num_waiting_tokens, self._max_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(f"requests with {waiting} prompt tokens wait, and with the {num_tokens} of this "
                                 f"one they are above the limit of {limit}; try again later")

    def _submit(self, stream: RequestStream, deadline: float | None) -> None:
        request_id = stream.request_id
        self._waiting[request_id] = len(stream.prompt_token_ids)
        self._streams[request_id] = stream
        if stream.incoming is not None:
            stream.incoming.streams.append(stream)
        self._idle.clear()
        try:
            self._llm.submit(stream.processed, lambda event: self._collect(stream, event), request_id=request_id,
                             patient=self._max_waiting_tokens is None)
            self._llm.call_soon(lambda: self._collect(stream, None))
        except EngineClosedError:
            self._forget(stream)
            raise
        if deadline is not None:
            left = max(stream.arrival + deadline - time.perf_counter(), 0)
            stream.deadline = self._loop.call_later(left, stream.expire)

    def _forget(self, stream: RequestStream) -> None:
        self._waiting.pop(stream.request_id, None)
        self._streams.pop(stream.request_id, None)
        if not self._streams:
            self._idle.set()

    def _collect(self, stream: RequestStream, event: StreamEvent | None) -> None:  # in the engine's thread
        """`event` None: the engine has taken the request."""
        self._outbox.append((stream, event, time.perf_counter()))
        # `_deliver` clears the flag before it looks into the outbox, so what is appended is always seen.
        if not self._collecting:
            self._collecting = True
            with contextlib.suppress(RuntimeError):  # the loop has closed, so nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._collecting = False
        while self._outbox:
            stream, event, at = self._outbox.popleft()
            if event is None:
                stream.admit()
                continue
            if event.token_ids:
                self._waiting.pop(stream.request_id, None)
                self._rate.add(len(event.token_ids), at)
                for observer in self._observers:
                    observer.increment(stream, event, at)
            stream.put(event, at)
            if event.output is not None:
                self._forget(stream)
                refused = event.output.error is not None and stream.first_event is None and not stream.begun
                if not refused:  # else `_start` counts it
                    for observer in self._observers:
                        observer.finished(stream, event.output, at)

    # -- text

    async def run_text(self, function: Callable[[], T], size: int = 0) -> T:
        """Runs work on text in a worker thread. `size`: about so many characters; long ones hold up no short ones."""
        pool = self._text_pool if size < _LONG_CHARS else self._long_text_pool
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = True) -> list[int]:
        """Raises RequestError: there is no tokenizer, the text is no valid Unicode, or too long: for the context or,
        without `must_fit`, for one go (see Processor.encode)."""
        return await self.run_text(lambda: self._llm.token_ids(text, add_special_tokens=add_special_tokens,
                                                               must_fit=must_fit), len(text))

    async def tokenize_chat(self, messages: Messages, template: Mapping[str, Any] | None = None) -> list[int]:
        """The prompt's ids of a conversation, also if they are more than fit. Raises RequestError."""
        return await self.run_text(lambda: self._llm.chat_token_ids(messages, must_fit=False, **(template or {})),
                                   num_chars(messages, _LONG_CHARS))

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False, param: str = "tokens") -> str:
        """The text of ids that a client gave. Raises RequestError, naming `param`: they are no ids of the tokenizer's,
        or too many, or there is no tokenizer."""
        if isinstance(ids, Sequence) and len(ids) > _MOST_IDS:
            raise RequestError(f"{param} has {len(ids)} ids, at most {_MOST_IDS} are taken at a time", param)

        def decode() -> str:
            tokenizer, checked = self._need_tokenizer(), check_token_ids(param, ids)
            if checked and max(checked) >= tokenizer.vocab_size:
                raise RequestError(f"{param} has the id {max(checked)}, but the vocabulary ends at "
                                   f"{tokenizer.vocab_size - 1}", param)
            return tokenizer.decode(checked, skip_special_tokens)

        return await self.run_text(decode, len(ids) if isinstance(ids, Sequence) else 0)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids that the model knows; those that only it knows have none. Raises RequestError: there is no
        tokenizer."""
        return await self.run_text(lambda: self._need_tokenizer().decode(ids, skip_special_tokens), len(ids))

    async def token_names(self, ids: Sequence[int]) -> list[str | None]:
        """The tokenizer's own. Raises RequestError: there is no tokenizer."""
        return await self.run_text(lambda: self._need_tokenizer().convert_ids_to_tokens(ids), len(ids))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; send token ids", "prompt")
        return self.tokenizer

    # -- facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._llm.tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset() if self.tokenizer is None else self.tokenizer.special_ids

    def token_piece(self, token_id: int) -> str | bytes:
        """What an id adds to a text: its text, or its bytes if they are not whole characters."""
        return self._llm.token_piece(token_id)

    @property
    def config(self) -> ResolvedConfig:
        """The engine's limits."""
        return self._llm.config

    @property
    def kv_cache_dtype(self) -> str:
        return self._llm.kv_cache_dtype

    @property
    def num_active(self) -> int:
        """Requests that the engine has not let go of."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests without a token so far."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return sum(self._waiting.values())

    @property
    def generation_rate(self) -> float:
        """Tokens a second that the engine has made in the last seconds."""
        return self._rate.value(time.perf_counter())

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        return self._llm.model_config

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._llm.eos_ids

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """See LLM.default_sampling."""
        return self._llm.default_sampling

    async def idle(self, timeout: float) -> bool:
        """Waits until no request runs. False if some still do after `timeout` seconds."""
        if self._idle.is_set():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
            return True  # though the next may have begun by now
        return False

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Raises EngineClosedError."""
        await asyncio.to_thread(self._llm.reset_prefix_cache)

    async def engine_metrics(self) -> dict[str, Any]:
        """`LLM.metrics`. While a step takes long (it compiles) or after the engine has ended, the last known."""
        if self._engine is not None and self._state is not State.STARTING:
            if self._snapshot_task is None:
                self._snapshot_task = asyncio.create_task(self._take_snapshot(self._engine))
            with contextlib.suppress(TimeoutError, EngineClosedError):
                async with asyncio.timeout(_SNAPSHOT_PATIENCE):
                    await asyncio.shield(self._snapshot_task)
        return self._snapshot

    async def _take_snapshot(self, llm: LLM) -> None:
        try:
            self._snapshot = await asyncio.to_thread(llm.metrics)
        finally:
            self._snapshot_task = None
