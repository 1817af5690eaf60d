"""Prompts of megabytes, of every kind and on both ports, again and again: they are refused, nobody else waits for them,
and they take no more memory than their bodies."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

import pytest

from jaxserve.client import Client
from jaxserve.errors import QueueFullError, RequestError
from tests.drills.process import PATIENCE, ServerProcess, server_process
from tests.llm import tiny

MEGABYTES = 12 << 20  # below the limit of bodies
TEXT = "a " * (MEGABYTES // 2)
BODIES = {
    "/v1/completions": [{"prompt": TEXT}, {"prompt": [TEXT]}, {"prompt": [1] * (MEGABYTES // 2)},
                        {"prompt": [[]] * (MEGABYTES // 4)}],
    "/v1/chat/completions": [{"messages": [{"role": "user", "content": TEXT}]},
                             {"messages": [{"role": "user", "content": "a"}] * (MEGABYTES // 26)}],
    "/v1/responses": [{"input": TEXT}],
    "/tokenize": [{"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}],
    "/detokenize": [{"tokens": [1] * (MEGABYTES // 2)}],
}
# Of four bodies that are held at a time one is read as JSON, where millions of empty lists take the most, and each call
# of gRPC has a message and what is made of it. To encode but one of these texts would take more than all of that.
MOST_MEMORY = 1 << 30
STREAMS = 8
TOKENS = 100


class Bully(threading.Thread):
    """Sends the same again and again until `enough`."""

    def __init__(self, send: Callable[[], None], enough: threading.Event):
        super().__init__(daemon=True)
        self._send, self._enough = send, enough
        self.answers = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self._send()
                self.answers += 1
        except BaseException as error:
            self.error = error


def poster(server: ServerProcess, path: str, bodies: list[bytes]) -> Callable[[], None]:
    def send() -> None:
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            connection.request("POST", path, body)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            assert answer.status in (400, 429), content  # 429: too many bodies at once

    return send


def caller(client: Client) -> Callable[[], None]:
    def send() -> None:
        for call in (lambda: client.generate(TEXT), lambda: client.tokenize(TEXT),
                     lambda: client.chat([{"role": "user", "content": TEXT}]),
                     lambda: client.generate([1] * MEGABYTES), lambda: client.detokenize([1] * MEGABYTES)):
            with pytest.raises((RequestError, QueueFullError)):
                call()

    return send


def test_nobody_waits_for_prompts_of_megabytes(tiny_files, xla_cache):
    options = tiny.ENGINE | {"compilation_cache_dir": xla_cache}
    with server_process(tiny_files, **options) as server, server.client() as client:
        enough, memory = threading.Event(), [server.memory()]
        senders = [poster(server, path, [json.dumps(body, separators=(",", ":")).encode() for body in bodies])
                   for path, bodies in BODIES.items()]
        bullies = [Bully(send, enough) for send in (*senders, caller(client))]
        for bully in bullies:
            bully.start()
        try:
            healths = events = rounds = 0
            # As long as it takes every one of them to have been refused while others are served.
            while rounds < STREAMS or not all(bully.answers for bully in bullies):
                rounds += 1
                stream = client.stream([97] if rounds % 2 else "a", max_tokens=TOKENS, ignore_eos=True)
                number = 0
                for event in stream:
                    number += len(event.token_ids)
                    events += 1
                    memory.append(server.memory())
                assert number == TOKENS
                assert json.loads(server.get("/health")) == {"status": "ready"}
                healths += 1
                assert not [bully.error for bully in bullies if bully.error]
        finally:
            enough.set()
            for bully in bullies:
                bully.join(PATIENCE)
        assert healths == rounds and not [bully.error for bully in bullies if bully.error]
        assert events > 5 * rounds, "what a server that stood still has made comes as one event"
        growth = max(memory) - memory[0]
        print(f"{rounds} rounds, {events} events, {[bully.answers for bully in bullies]} answers, {growth >> 20} MB")
        assert growth < MOST_MEMORY, f"{growth >> 20} MB"
        server.assert_nothing_is_held(27)
        assert client.generate("a", max_tokens=3, ignore_eos=True)
