"""Files of the OpenAI batch API: one request a line, answered by the code of the HTTP face, without a socket."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.sampling_params import shortened
from jaxserve.serving.http.answers import Json, to_json
from jaxserve.serving.http.calls import CALLS
from jaxserve.serving.http.errors import ApiError, api_error, invalid
from jaxserve.serving.http.fields import parse_json
from jaxserve.serving.service import Service


class LineError(Exception):
    """A line is no request. `code`: the batch API's word for it. `custom_id`: as it was given, to be found again."""

    def __init__(self, code: str, message: str, custom_id: Any = None):
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True)
class Task:
    """One line: a request for `path`, or what is wrong with it."""

    custom_id: Any
    path: str
    body: Any
    error: LineError | None = None


def read_tasks(lines: Iterable[bytes]) -> list[Task]:
    """One task for each line that is not empty. Of lines with the same custom_id the first counts."""
    tasks: list[Task] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(number, line, seen))
            except LineError as error:
                tasks.append(Task(error.custom_id, "", None, error))
    return tasks


def _task(number: int, line: bytes, seen: set[str]) -> Task:
    try:
        request = parse_json(line)
    except ApiError as error:
        raise LineError("invalid_json_line", f"line {number}: {error}") from None
    if not isinstance(request, dict):
        raise LineError("invalid_json_line", f"line {number} is no JSON object")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        got = "none" if custom_id is None else shortened(custom_id)
        raise LineError("missing_required_parameter", f"line {number}: custom_id must be a text, got {got}", custom_id)
    if custom_id in seen:
        raise LineError("duplicate_custom_id", f"line {number}: the custom_id of an earlier line; each must be unique",
                        custom_id)
    seen.add(custom_id)
    if request.get("method") != "POST":
        raise LineError("invalid_method", f"line {number}: method must be \"POST\"", custom_id)
    path = request.get("url")
    if not isinstance(path, str) or path not in CALLS:
        raise LineError("invalid_url", f"line {number}: url must be one of {', '.join(CALLS)}", custom_id)
    if "body" not in request:
        raise LineError("missing_required_parameter", f"line {number} has no body", custom_id)
    unknown = sorted(request.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise LineError("invalid_request", f"line {number} has unknown field(s) {', '.join(unknown)}", custom_id)
    return Task(custom_id, path, request["body"])


class BatchRun:
    """Answers tasks, many at a time.

    Args:
        service: without a bound on what waits, so that no line is refused for being one of many.
        write: called with the output line of each task, in the order in which they end.

    Attributes:
        num_failed: tasks without an answer so far.
        num_tokens: generated so far.
    """

    def __init__(self, service: Service, write: Callable[[bytes], None], *, trust_templates: bool = False):
        self.num_failed = 0
        self.num_tokens = 0
        self._service = service
        self._write = write
        self._trust_templates = trust_templates

    async def run(self, tasks: Sequence[Task]) -> None:
        """Answers all of them. Cancelling aborts those that run. Raises what `write` raises."""
        # Twice what runs at once, so that a sequence that ends has a successor in the queue.
        workers = min(2 * self._service.config.max_num_seqs, len(tasks))
        remaining = iter(tasks)
        await asyncio.gather(*(self._work(remaining) for _ in range(workers)))

    async def _work(self, remaining: Iterator[Task]) -> None:
        for task in remaining:
            self._write(to_json(await self._line(task)) + b"\n")

    async def _line(self, task: Task) -> Json:
        line: Json = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": task.custom_id, "response": None,
                      "error": None}
        if task.error is not None:
            self.num_failed += 1
            return line | {"error": {"code": task.error.code, "message": str(task.error)}}
        request_id = uuid.uuid4().hex
        try:
            status, body = 200, await self._answer(task, request_id)
        except Exception as error:  # one line's fault is none of the others'
            self.num_failed += 1
            answer = api_error(error)
            status, body = answer.status, answer.body()
        return line | {"response": {"status_code": status, "request_id": request_id, "body": body}}

    async def _answer(self, task: Task, request_id: str) -> Json:
        call = CALLS[task.path](self._service, task.body, request_id, trust_templates=self._trust_templates)
        if call.streamed:
            raise invalid("stream must be false in a batch", "stream")
        body = await call.whole(await call.start())
        usage = body["usage"]
        self.num_tokens += usage.get("completion_tokens", usage.get("output_tokens"))
        return body
