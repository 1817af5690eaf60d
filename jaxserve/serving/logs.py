"""The server's log: as lines or as JSON, and a line for each call.

A call's line has counts and times. Prompts and answers are in it only if that was asked for; keys never are, nor
are query strings and headers.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from typing import Any, Literal

from jaxserve.serving.incoming import Incoming

LogFormat = Literal["text", "json"]

logger = logging.getLogger("jaxserve.access")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what `extra={"facts": ...}` holds, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        entry |= getattr(record, "facts", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def use_format(log_format: LogFormat) -> None:
    """Puts time and level before the lines of jaxserve's loggers and of the libraries that serve, or makes them JSON,
    and what other libraries warn of too, so that every line can be parsed. Before grpc is imported."""
    formatter = JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handlers = logging.getLogger("jaxserve").handlers
    for handler in handlers:
        handler.setFormatter(formatter)
    if log_format == "json":
        # The core of grpc writes lines of its own, such as of handshakes that failed.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        logging.captureWarnings(True)
        root = logging.getLogger()
        root.handlers[:] = handlers
        root.setLevel(logging.WARNING)
    else:
        for name in ("uvicorn", "asyncio", "grpc"):
            library = logging.getLogger(name)
            library.handlers[:] = handlers
            library.propagate = False


class AccessLog:
    """A line for each call that has ended.

    Args:
        log_prompts: with the texts of prompts and answers.
    """

    def __init__(self, *, log_prompts: bool = False):
        self._log_prompts = log_prompts

    def log(self, call: Incoming, status: int | str, *, level: int = logging.INFO) -> None:
        """`status`: of HTTP, or the name of gRPC's."""
        if not logger.isEnabledFor(level):
            return
        facts = {"request_id": call.request_id, "client": call.client, "method": call.method, "status": status,
                 "seconds": round(time.perf_counter() - call.arrival, 6)}
        text = f"{call.method} {status} in {facts['seconds']:.3f} s, id {call.request_id}, from {call.client}"
        if call.streams:
            facts |= _generation(call)
            text += (f": {facts['prompt_tokens']} prompt tokens, {facts['cached_tokens']} of them cached, "
                     f"{facts['completion_tokens']} tokens")
            if "first_token_seconds" in facts:
                text += f", the first after {facts['first_token_seconds']:.3f} s"
            if "aborted_by" in facts:
                text += f", aborted by {facts['aborted_by']}"
            if self._log_prompts:
                texts = _texts(call)
                facts |= texts
                text += f", prompts {texts['prompts']!r}, answers {texts['answers']!r}"
        logger.log(level, "%s", text, extra={"facts": facts})


def _generation(call: Incoming) -> dict[str, Any]:
    streams, outputs = call.streams, [stream.output for stream in call.streams if stream.output is not None]
    facts: dict[str, Any] = {
        "prompt_tokens": sum(len(stream.prompt_token_ids) for stream in streams),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "completion_tokens": sum(stream.num_tokens for stream in streams)}
    queues = [output.timings.queue for output in outputs if output.timings.queue is not None]
    if queues:
        facts["queue_seconds"] = round(max(queues), 6)
    firsts = [stream.first_event for stream in streams if stream.first_event is not None]
    if firsts:
        facts["first_token_seconds"] = round(min(firsts) - call.arrival, 6)
    reasons = [completion.finish_reason for output in outputs for completion in output.outputs]
    if reasons:
        facts["finish_reasons"] = reasons
    causes = sorted({stream.abort_cause for stream in streams if stream.abort_cause is not None})
    if causes:
        facts["aborted_by"] = ", ".join(causes)
    return facts


def _texts(call: Incoming) -> dict[str, list[str]]:
    return {"prompts": [stream.prompt_text() for stream in call.streams],
            "answers": [completion.text for stream in call.streams if stream.output is not None
                        for completion in stream.output.outputs]}
