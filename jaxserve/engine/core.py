"""The loop: schedule, launch, and commit one step late.

While the device computes step N+1, the host fetches step N, appends its ids, finds stop strings and
sends text. So what a step was planned on may be out of date when it runs: a sequence that stopped in
step N has one wasted row in step N+1, whose result `commit` ignores.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import ResolvedConfig
from jaxserve.engine.output_builder import LogprobRow, RequestState
from jaxserve.engine.request import Sequence, StepPlan
from jaxserve.engine.results import Fault, LogprobRows, StepResult
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineError, QueueFullError, RequestError
from jaxserve.outputs import StreamEvent

logger = logging.getLogger(__name__)

# After so many failed steps without a good one between, recomputing is no cure: everything is failed.
_MAX_FAILED_STEPS = 2
# After so many times of that without a good step between, the device is beyond help: the engine ends, and whoever
# supervises the process can start another.
_MAX_FAILED_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StepStats:
    """One turn of the loop: a step launched, and the one before it taken in.

    Attributes:
        seconds: of the whole turn.
        host_seconds: of these, what was not spent waiting for the device.
        num_tokens: what the launched step computes.
    """

    seconds: float
    host_seconds: float
    num_tokens: int


class StepRunner(Protocol):
    """What the core needs of runtime.runner.Runner. `waited`: seconds for which it has waited for the device."""

    config: ResolvedConfig
    waited: float

    def launch(self, plan: StepPlan) -> Any: ...
    def fetch(self, launched: Any) -> StepResult: ...
    def reset_state(self) -> None: ...


class Request:
    """A user's request in the engine: its state, its sequences (one a completion) and its listener.

    Args:
        on_event: called in the engine's thread with each StreamEvent; must not block. The last event of
            a request carries its output.
        patient: wait for room in the queue instead of failing with QueueFullError.
    """

    __slots__ = ("state", "on_event", "patient", "sequences")

    def __init__(self, state: RequestState, on_event: Callable[[StreamEvent], None], patient: bool):
        self.state = state
        self.on_event = on_event
        self.patient = patient
        self.sequences: list[Sequence] = []

    @property
    def num_sequences(self) -> int:
        return len(self.state.processed.options)

    @property
    def priority(self) -> int:
        return self.state.processed.params.priority


class EngineCore:
    """Owns the scheduler and the steps in flight. One thread calls it.

    Attributes:
        step_listeners: called after each turn that launched a step; must not raise.
        num_failed_steps: since start.
        num_not_finite: requests that ended because of NaN or infinite logits, since start.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner):
        self.scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}
        self._backlog: list[Request] = []  # patient requests that the queue had no room for, most important first
        self._of_sequence: dict[int, tuple[Request, int]] = {}
        self._seq_ids = itertools.count()
        self._in_flight: tuple[StepPlan, Any] | None = None  # and what the runner launched for it
        self._failed_steps = self._failed_rounds = 0  # without a good step since
        self.num_failed_steps = self.num_not_finite = 0
        self.step_listeners: list[Callable[[StepStats], None]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._in_flight is not None

    # -- requests

    def add(self, request: Request) -> None:
        """Takes a request. What is wrong with it arrives as its error event."""
        request_id = request.state.request_id
        if request_id in self._requests:
            self._emit(request, request.state.fail(RequestError(f"request id {request_id!r} is in use", "request_id")))
            return
        self._requests[request_id] = request
        limit, fits = self.scheduler.config.max_waiting_requests, request.num_sequences <= self.scheduler.queue_room
        if request.num_sequences > limit:
            self._fail(request, RequestError(f"n={request.num_sequences}, but the engine queues at most {limit} "
                                             f"sequences (max_waiting_requests)", "n"))
        elif fits and not (request.patient and self._backlog):  # who cannot wait may go before those who can
            self._queue(request)
        elif request.patient:
            insort(self._backlog, request, key=lambda other: other.priority)
        else:
            self._fail(request, QueueFullError(
                f"the waiting queue is full: it has room for {self.scheduler.queue_room} of {request.num_sequences} "
                f"sequences (max_waiting_requests={limit}); try again later"))

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and ended ones are fine."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request in self._backlog:
            self._backlog.remove(request)
        events = request.state.abort()
        self._drop_sequences(request)
        self._forget(request)
        self._emit(request, events)

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def refuse(self, request: Request, error: EngineError) -> None:
        """Ends a request that could not be added."""
        self._emit(request, request.state.fail(error))

    def fail_all(self, cause: BaseException) -> None:
        """Ends every request with an EngineError. Leaves the scheduler alone: it may be what has failed."""
        requests, self._requests = self._requests, {}
        self._backlog.clear()
        self._of_sequence.clear()
        for request in requests.values():
            self.refuse(request, engine_error(cause))

    def _queue(self, request: Request) -> None:
        processed = request.state.processed
        try:
            for index, options in enumerate(processed.options):
                seq_id = next(self._seq_ids)
                seq = Sequence(seq_id=seq_id, prompt_len=len(processed.prompt_token_ids),
                               token_ids=list(processed.prompt_token_ids), options=options, arrival=seq_id)
                self.scheduler.add(seq)
                request.sequences.append(seq)
                self._of_sequence[seq_id] = (request, index)
        except RequestError as error:
            self._fail(request, error)

    def _feed_backlog(self) -> None:
        while self._backlog and self._backlog[0].num_sequences <= self.scheduler.queue_room:
            self._queue(self._backlog.pop(0))

    def _fail(self, request: Request, error: Exception) -> None:
        events = request.state.fail(error)
        self._drop_sequences(request)
        self._forget(request)
        self._emit(request, events)

    def _drop_sequences(self, request: Request) -> None:
        for seq in request.sequences:
            self.scheduler.finish(seq)
            self._of_sequence.pop(seq.seq_id, None)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.state.request_id, None)

    def _emit(self, request: Request, events: list[StreamEvent]) -> None:
        for event in events:
            try:
                request.on_event(event)
            except Exception:  # a listener's fault must not end the other requests
                logger.exception("listener of request %s failed", request.state.request_id)

    # -- steps

    def step(self) -> None:
        """Launches the next step, then takes in the one before it.

        Raises:
            Exception: what made the last of several steps fail, when there is no hope left. All requests have ended.
        """
        if not self.step_listeners:
            self._step()
            return
        started, waited = time.perf_counter(), self._runner.waited
        plan = self._step()
        if plan is not None:
            seconds = time.perf_counter() - started
            stats = StepStats(seconds, seconds - (self._runner.waited - waited),
                              sum(row.num_tokens for row in (*plan.decodes, *plan.prefills)))
            for listener in self.step_listeners:
                listener(stats)

    def _step(self) -> StepPlan | None:
        """Returns the plan of what was launched."""
        self._feed_backlog()
        before = self._in_flight
        try:
            plan = self.scheduler.schedule()
            self._in_flight = None if plan is None else (plan, self._runner.launch(plan))
        except Exception as error:
            self._recover(error)
            return None
        if plan is not None:
            for seq in plan.admitted:
                self._of_sequence[seq.seq_id][0].state.mark_scheduled(seq.num_cached_tokens)
        if before is not None:
            plan_before, launched = before
            try:
                result = self._runner.fetch(launched)
            except Exception as error:
                self._recover(error)
                return None
            self._failed_steps = self._failed_rounds = 0
            self._take(plan_before, result)
        if not self.has_work:
            self.scheduler.check_idle()
        return plan

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        for seq_id, (start, rows) in result.prompt_logprobs.items():
            if seq_id in self._of_sequence:
                self._of_sequence[seq_id][0].state.add_prompt_logprobs(start + 1, _logprob_rows(rows))
        for seq, ids in self.scheduler.commit(plan, result.token_ids):
            rows = result.logprobs.get(seq.seq_id)
            self._append(seq, ids, None if rows is None else _logprob_rows(rows))
        for seq_id, fault in result.failed.items():
            if seq_id in self._of_sequence:  # it has not ended before
                self._fail_for(fault, self._of_sequence[seq_id][0])

    def _fail_for(self, fault: Fault, request: Request) -> None:
        if fault is Fault.NOT_FINITE:
            self.num_not_finite += 1
            self._fail(request, EngineError("the model's logits are not finite (NaN or infinite) for this request"))
        else:
            # The processor refuses what leaves nothing from the start; a bad word of several tokens shows on the way.
            self._fail(request, RequestError(
                "no token is left to generate: after the text so far, bad_words and allowed_token_ids (or min_tokens, "
                "until which EOS and stop_token_ids are masked) exclude every id", "bad_words"))

    def _append(self, seq: Sequence, ids: list[int], logprobs: list[LogprobRow] | None) -> None:
        if seq.seq_id not in self._of_sequence:
            return
        request, index = self._of_sequence[seq.seq_id]
        try:
            event = request.state.append(index, ids, logprobs)
        except Exception as error:  # the text of one request is no reason to end the others
            logger.exception("request %s failed", request.state.request_id)
            self._fail(request, engine_error(error))
            return
        if event is None:
            return
        if event.finish_reason is not None:
            # Ended by EOS or length, which the scheduler knows, or by a stop string, which it does not.
            self.scheduler.finish(seq)
            del self._of_sequence[seq.seq_id]
            if request.state.finished:
                self._forget(request)
        self._emit(request, [event])

    def _recover(self, error: Exception) -> None:
        """A step failed, and with it went the donated state. Everything is computed again, once."""
        self._in_flight = None
        self.num_failed_steps += 1
        self._failed_steps += 1
        if self._failed_steps < _MAX_FAILED_STEPS:
            logger.exception("a step failed; rebuilding the KV pool and recomputing", exc_info=error)
            self.scheduler.requeue_all()
        else:
            logger.error("%d steps failed in a row; failing all requests", self._failed_steps, exc_info=error)
            self._failed_steps = 0
            self._failed_rounds += 1
            self.scheduler.fail_all()
            self.fail_all(error)
            if self._failed_rounds == _MAX_FAILED_ROUNDS:
                raise error
        self._runner.reset_state()


def engine_error(cause: BaseException) -> EngineError:
    """What the callers see when `cause` ended their work: an object of its own for each of them."""
    error = EngineError(f"the engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _logprob_rows(rows: LogprobRows) -> list[LogprobRow]:
    return [LogprobRow(*row) for row in zip(rows.token_logprob.tolist(), rows.token_rank.tolist(),
                                            rows.top_ids.tolist(), rows.top_logprobs.tolist(), strict=True)]
