"""A running request, as the one who reads its answer sees it.

The event loop puts events into its mailbox, which holds at most one increment of each completion: what its reader has
not fetched yet is merged. So a slow reader gets larger increments, and costs no more memory than the request's own
output.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from jaxserve.engine.processor import ProcessedRequest
from jaxserve.errors import JaxserveError
from jaxserve.outputs import FinishReason, PositionLogprobs, RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.incoming import CURRENT, Incoming

if TYPE_CHECKING:
    from jaxserve.serving.service import Service


DEADLINE_SLACK_SECONDS = 0.1  # by which clocks and messages of a client and ours may differ


class UnavailableError(JaxserveError):
    """The service takes no requests: it is starting, draining or has failed."""


class DeadlineExceededError(JaxserveError):
    """The request's deadline came before its end; it has been aborted."""


class RequestStream:
    """A running request: an asynchronous iterator over its StreamEvents, for one reader.

    The last event carries the whole output. Iterating raises the request's error if it fails,
    DeadlineExceededError, and UnavailableError if the service stops before the end. Use it as a context
    manager: leaving aborts what has not ended. So does cancelling the task that waits for an event.

    Attributes:
        request_id: the engine's id of it.
        operation: "chat" or "text_completion".
        params: as the client gave them.
        incoming: the call that it is a part of; None without a face.
        processed: the checked request.
        arrival, first_event: time.perf_counter() of these moments; None until it was.
        last_events: the same of each completion's latest tokens.
        num_tokens: made so far, in all completions.
        output: at the end, also of one that was aborted.
        abort_cause: "client", "abort", "deadline" or "drain" once aborted; None again if it ended all the same.
        begun: its reader has it; what goes wrong from here on is no refusal.
        let_go: by the engine; nothing more comes from it.
        deadline: the service's timer.

    `admit`, `admission`, `put`, `expire` and `abort` are the service's.
    """

    def __init__(self, service: Service, request_id: str, operation: str, params: SamplingParams):
        self.request_id = request_id
        self.operation = operation
        self.params = params
        self.incoming: Incoming | None = CURRENT.get()
        self.processed: ProcessedRequest
        self.num_tokens = 0
        self.output: RequestOutput | None = None
        self.arrival = time.perf_counter()
        self.first_event: float | None = None
        self.last_events: dict[int, float] = {}
        self.abort_cause: str | None = None
        self._service = service
        self._mailbox: dict[int, _Increment] = {}
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None  # until the first event is read
        self._wake = asyncio.Event()
        self._admitted = False
        self.begun = False
        self._read = False  # to the end, by the reader
        self.let_go = False
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.processed.prompt_token_ids

    def prompt_text(self) -> str:
        """The prompt, special tokens included."""
        tokenizer = self._service.tokenizer
        return str(self.prompt_token_ids) if tokenizer is None else tokenizer.decode(self.prompt_token_ids, False)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._read:
            raise StopAsyncIteration
        while not self._mailbox:
            if self.abort_cause == "deadline":
                self._read = True
                raise DeadlineExceededError("the deadline came before the end of the request")
            await self._woken()
        index = next(iter(self._mailbox))
        increment = self._mailbox[index].made_before_failing() or self._mailbox.pop(index)
        event = increment.event(index, self._prompt_logprobs)
        self._prompt_logprobs = None
        if event.output is not None:
            self._read = True
            if event.output.error is not None:
                raise event.output.error
            if self.abort_cause == "deadline":
                raise DeadlineExceededError("the deadline came before the end of the request")
            if self.abort_cause == "drain":
                raise UnavailableError("the server shut down before the end of the request")
        return event

    async def aclose(self) -> None:
        """Aborts the request unless it has ended. It gives nothing more."""
        self._close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._read = True
        self._mailbox.clear()
        # A gRPC client's deadline ends its call by itself, a moment before our own timer.
        now = asyncio.get_running_loop().time()
        late = self.deadline is not None and self.deadline.when() - now < DEADLINE_SLACK_SECONDS
        self.abort("deadline" if late else "client")

    def abort(self, cause: str) -> None:
        if not self.let_go and self.abort_cause is None:
            self.abort_cause = cause
            self._service.end_request(self.request_id)

    async def _woken(self) -> None:
        self._wake.clear()
        try:
            await self._wake.wait()
        except asyncio.CancelledError:
            self._close()
            raise

    def admit(self) -> None:
        """The engine has taken the request."""
        self._admitted = True
        self._wake.set()

    async def admission(self) -> None:
        """Waits until the engine has taken the request. Raises its reason if it has not."""
        while not self._admitted and not self.let_go:
            await self._woken()
        for increment in self._mailbox.values():
            if increment.output is not None and increment.output.error is not None and self.first_event is None:
                self._read = True
                raise increment.output.error
        self.begun = True

    def expire(self) -> None:
        self.abort("deadline")
        self._wake.set()

    def put(self, event: StreamEvent, at: float) -> None:
        if event.token_ids:
            self.first_event = self.first_event or at
            self.last_events[event.index] = at
            self.num_tokens += len(event.token_ids)
        if event.output is not None:
            self.output = event.output
            self.let_go = True
            if self.deadline is not None:
                self.deadline.cancel()
            if all(completion.finish_reason != "abort" for completion in event.output.outputs):
                self.abort_cause = None  # it had ended before the engine heard of it
        if not self._read:
            self._prompt_logprobs = self._prompt_logprobs or event.prompt_logprobs
            increment = self._mailbox.pop(event.index, None) or _Increment()
            increment.add(event)
            self._mailbox[event.index] = increment  # at the end: the event with the output has to be the last
            self._wake.set()


class _Increment:
    """Events of one completion, merged."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self.output: RequestOutput | None = None

    def add(self, event: StreamEvent) -> None:
        self._texts.append(event.text)
        self._token_ids += event.token_ids
        if event.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []  # our own: the engine's list is not ours to change
            self._logprobs += event.logprobs
        self._finish_reason, self._stop_reason, self.output = event.finish_reason, event.stop_reason, event.output

    def made_before_failing(self) -> _Increment | None:
        """Of a request that failed, what was made before, if anything; then the failure is left."""
        if self._finish_reason != "error" or not self._token_ids:
            return None
        made = _Increment()
        made._texts, made._token_ids, made._logprobs = self._texts, self._token_ids, self._logprobs
        self._texts, self._token_ids, self._logprobs = [], [], None
        return made

    def event(self, index: int, prompt_logprobs: list[PositionLogprobs | None] | None) -> StreamEvent:
        return StreamEvent(index, "".join(self._texts), self._token_ids, self._logprobs, self._finish_reason,
                           self._stop_reason, self.output, prompt_logprobs)
