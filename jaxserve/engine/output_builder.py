"""Collects what the engine computes for one request into stream events and the final output.

There is one pipeline: a whole result is the sum of its stream's events, in text, ids and logprobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.engine.detokenizer import Detokenizer, TokenTexts
from jaxserve.engine.processor import ProcessedRequest
from jaxserve.engine.request import SequenceOptions
from jaxserve.engine.stop_strings import StopStrings
from jaxserve.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestTimings,
    StreamEvent,
)


class LogprobRow(NamedTuple):
    """One position's log-probabilities as they come from the device, in Python's own numbers.

    `logprob`, `rank`: of the token that stands at the position (sampled, or of the prompt); rank 1 is
    the best. `top_ids`, `top_logprobs`: the best entries, best first, at least as many as were asked for.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestState:
    """One request while it runs. Used by one thread at a time.

    `append` decides whether a completion has ended, from the text (stop strings) and from its options
    (EOS, stop ids, length); the engine reads that from the event and frees the sequence.

    Args:
        texts: the engine's shared TokenTexts; None without a tokenizer.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        request_id: str,
        processed: ProcessedRequest,
        texts: TokenTexts | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.request_id = request_id
        self.processed = processed
        self._clock = clock
        self._arrival = clock()
        self._timings = RequestTimings()
        self._num_cached_tokens = 0
        self._error: Exception | None = None
        params = processed.params
        self._texts = texts if params.detokenize else None
        stops = StopStrings(params.stop_strings) if params.stop_strings else None
        self._completions = [
            _Completion(index, options, params.max_tokens == 0, self._texts, self._new_detokenizer(stops),
                        params.include_stop_str_in_output)
            for index, options in enumerate(processed.options)
        ]
        self._num_running = len(self._completions)
        self._prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None for _ in processed.prompt_token_ids])

    @property
    def finished(self) -> bool:
        return self._num_running == 0

    def mark_scheduled(self, num_cached_tokens: int) -> None:
        """The request's first sequence has been admitted, with this many prompt tokens from the prefix
        cache. Later calls (more completions, preemption) change nothing."""
        if self._timings.queue is None:
            self._timings.queue = self._clock() - self._arrival
            self._num_cached_tokens = num_cached_tokens

    def add_prompt_logprobs(self, start: int, rows: Sequence[LogprobRow]) -> None:
        """Prompt positions `start`, `start + 1`, ...; the first that exists is 1. A chunk may come twice
        (several completions, preemption): the first counts. Positions that a step computed come before
        the ids it sampled, since those may end the request."""
        assert self._prompt_logprobs is not None and start >= 1
        k = self.processed.params.prompt_logprobs
        assert k is not None
        for position, row in enumerate(rows, start):
            if self._prompt_logprobs[position] is None:
                token_id = self.processed.prompt_token_ids[position]
                self._prompt_logprobs[position] = _position_logprobs(token_id, row, k, self._texts)

    def append(
        self, index: int, token_ids: Sequence[int], logprob_rows: Sequence[LogprobRow] | None = None
    ) -> StreamEvent | None:
        """New ids of one completion, with a row each if logprobs were asked for.

        Ids behind the one that ends the completion are dropped, and so is all that comes for a completion
        that has ended (a step in flight samples one token too many): then the answer is None.
        """
        completion = self._completions[index]
        if completion.finish_reason is not None or not token_ids:
            return None
        prompt_logprobs = None
        if self._timings.first_token is None:
            self._timings.first_token = self._clock() - self._arrival
            prompt_logprobs = self._prompt_logprobs  # complete: whatever sampled has read the whole prompt
        return self._event(completion, completion.append(token_ids, logprob_rows), prompt_logprobs)

    def finish(self, index: int, reason: FinishReason, stop_reason: int | str | None = None) -> StreamEvent | None:
        """Ends a completion from outside (abort, error, length). None if it has ended already."""
        completion = self._completions[index]
        if completion.finish_reason is not None:
            return None
        return self._event(completion, completion.finish(reason, stop_reason))

    def abort(self) -> list[StreamEvent]:
        """Ends every running completion with "abort"."""
        return self._finish_all("abort")

    def fail(self, error: Exception) -> list[StreamEvent]:
        """Ends every running completion with "error"; the output carries the exception."""
        if not self.finished:
            self._error = error
        return self._finish_all("error")

    def output(self) -> RequestOutput:
        """All that is known so far. The lists are the caller's own."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=list(self.processed.prompt_token_ids),
            outputs=[completion.output() for completion in self._completions],
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            timings=RequestTimings(self._timings.queue, self._timings.first_token, self._timings.total),
            error=self._error,
        )

    def _new_detokenizer(self, stops: StopStrings | None) -> Detokenizer | None:
        if self._texts is None:
            return None
        params = self.processed.params
        return Detokenizer(
            self._texts, stops=stops, include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens, skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens)

    def _finish_all(self, reason: FinishReason) -> list[StreamEvent]:
        events = (self.finish(index, reason) for index in range(len(self._completions)))
        return [event for event in events if event is not None]

    def _event(self, completion: _Completion, step: _Increment,
               prompt_logprobs: list[PositionLogprobs | None] | None = None) -> StreamEvent:
        output = None
        if completion.finish_reason is not None:
            self._num_running -= 1
            if self.finished:
                self._timings.total = self._clock() - self._arrival
                output = self.output()
        return StreamEvent(
            completion.index, step.text, step.token_ids, step.logprobs, completion.finish_reason,
            completion.stop_reason, output, prompt_logprobs)


class _Increment(NamedTuple):
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None


class _Completion:
    """One of a request's completions: its ids, text and logprobs, and when it ends."""

    def __init__(
        self,
        index: int,
        options: SequenceOptions,
        scoring: bool,
        texts: TokenTexts | None,
        detokenizer: Detokenizer | None,
        include_stop: bool,
    ):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._options = options
        self._scoring = scoring
        self._texts = texts
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._end_ids = options.eos_ids | options.stop_ids
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if options.logprobs is None else []
        self._cumulative = 0.0

    def append(self, token_ids: Sequence[int], rows: Sequence[LogprobRow] | None) -> _Increment:
        if self._scoring:
            return self.finish("length")
        ids = list(token_ids[: self._options.max_tokens - len(self._token_ids)])
        end = None
        if not self._end_ids.isdisjoint(ids):
            end = next(i for i, token_id in enumerate(ids) if token_id in self._end_ids)
            del ids[end + 1:]
        text, stop_string = "", None
        if self._detokenizer is not None:
            shown = ids if end is None or self._include_stop else ids[:end]
            text, num_ids, stop_string = self._detokenizer.update(shown)
            if stop_string is not None:
                del ids[num_ids:]
        self._token_ids += ids
        logprobs = self._add_logprobs(ids, rows)
        if stop_string is not None:
            text += self._end("stop", stop_string)
        elif end is not None:
            # An id that is EOS and a stop id counts as EOS: the user's list added nothing to it.
            text += self._end("stop", None if ids[-1] in self._options.eos_ids else ids[-1])
        elif len(self._token_ids) == self._options.max_tokens:
            text += self._end("length", None)
        self._text.append(text)
        return _Increment(text, ids, logprobs)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> _Increment:
        text = self._end(reason, stop_reason)
        self._text.append(text)
        return _Increment(text, [], None if self._logprobs is None else [])

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=list(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
        )

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> str:
        """Ends the completion; returns the text that was held back."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        return "" if self._detokenizer is None else self._detokenizer.finish()

    def _add_logprobs(self, ids: list[int], rows: Sequence[LogprobRow] | None) -> list[PositionLogprobs] | None:
        if self._logprobs is None:
            return None
        k = self._options.logprobs
        assert rows is not None and k is not None and len(rows) >= len(ids), "logprobs were asked for"
        new = [_position_logprobs(token_id, row, k, self._texts) for token_id, row in zip(ids, rows)]
        self._logprobs += new
        self._cumulative += sum(row.logprob for row in rows[: len(ids)])
        return new


def _position_logprobs(token_id: int, row: LogprobRow, k: int, texts: TokenTexts | None) -> PositionLogprobs:
    """The k best entries, and the position's own token behind them if it is none of them."""
    text = _no_text if texts is None else texts.text
    entries: PositionLogprobs = {}
    for rank, top_id, logprob in zip(range(1, k + 1), row.top_ids, row.top_logprobs):
        entries[top_id] = Logprob(logprob, rank, text(top_id))
    if token_id not in entries:
        # Among equals the device may rank it higher than the list, which then ends before it.
        entries[token_id] = Logprob(row.logprob, max(row.rank, k + 1), text(token_id))
    return entries


def _no_text(token_id: int) -> None:
    return None
