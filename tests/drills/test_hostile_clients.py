"""One server after another abuse, on both ports: each gets its answer or nothing, and the next client is served."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import urllib.error

import grpc
import pytest

from jaxserve.client import Client, ServerError
from jaxserve.errors import JaxserveError, RequestError
from tests.drills.process import PATIENCE, ServerProcess, server_process
from tests.llm import tiny

KEY = "a-key"
PAGES = tiny.ENGINE["num_pages"] - 1


@pytest.fixture(scope="module")
def server(tiny_files, xla_cache):
    with server_process(tiny_files, key=KEY, **tiny.ENGINE, compilation_cache_dir=xla_cache,
                        served_model_name="tiny") as server:
        yield server


@pytest.fixture(autouse=True)
def the_next_client_is_served(server):
    before = server.memory()
    yield
    assert server.post("/v1/completions", prompt="Hello", max_tokens=2)["usage"]["prompt_tokens"] == 5
    with server.client() as client:
        assert client.generate("Hello", max_tokens=2)[0].prompt_token_ids == list(b"Hello")
    server.assert_nothing_is_held(PAGES)
    assert server.memory() - before < 200 << 20


def status(server: ServerProcess, body: dict, path: str = "/v1/completions", key: str | None = KEY) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200 or set(json.loads(answer.read())["error"]) == {"message", "type", "param", "code"}
        return answer.status
    finally:
        connection.close()


def request(body: dict, *, length: int | None = None, key: str = KEY) -> bytes:
    content = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(content) if length is None else length}\r\n\r\n").encode() + content


def test_prompts_that_are_too_long(server):
    for stream in (False, True):
        assert status(server, {"prompt": "x" * 5000, "stream": stream}) == 400
        assert status(server, {"messages": [{"role": "user", "content": "x" * 5000}], "stream": stream},
                      "/v1/chat/completions") == 400
    with server.client() as client, pytest.raises(RequestError, match="5000"):
        client.generate("x" * 5000)


@pytest.mark.parametrize("options", [
    {"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": -1}, {"n": 10**6}, {"stop": [""]}, {"logprobs": 10**6},
    {"allowed_token_ids": [10**6]}, {"logit_bias": {10**6: 1.0}}, {"min_tokens": 10**6}])
def test_bad_parameters(server, options):
    assert status(server, {"prompt": "Hello", **options}) == 400
    with server.client() as client, pytest.raises(RequestError):
        # A client that checks nothing: ours refuses some of this before it sends.
        client.generate("Hello", **options)


def test_bodies_of_64_megabytes(server):
    with contextlib.suppress(ConnectionError):  # it may close before all has been sent
        assert status(server, {"prompt": "x" * (64 << 20)}) == 413
    with server.client(max_message_bytes=256 << 20) as client, pytest.raises(JaxserveError, match="larger|too large"):
        client.generate("x" * (80 << 20))


def test_wrong_keys(server):
    for key in ("another", "", None, KEY + "x", "\xe9"):
        assert status(server, {"prompt": "Hello"}, key=key) == 401
        assert status(server, {"prompt": "Hello"}, "/tokenize", key=key) == 401
    for token in ("another", None):
        with Client(server.target, token=token) as client, pytest.raises(ServerError, match="UNAUTHENTICATED"):
            client.generate("Hello")


def test_readers_that_never_read(server):
    """Their answers end all the same, and wait in the server's buffers; then they leave."""
    body = {"prompt": "a", "max_tokens": 100, "n": 2, "logprobs": 20, "stream": True, "ignore_eos": True}
    before = server.metrics()["vllm:request_success_total{finished_reason=length}"]
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(request(body))
        # Somebody who reads does not wait for them: their turn comes as if they were gone.
        assert status(server, {"prompt": "b", "max_tokens": 3}) == 200
        server.wait_until(
            lambda: server.metrics()["vllm:request_success_total{finished_reason=length}"] >= before + 40)


def test_readers_of_one_byte_at_a_time(server):
    body = {"prompt": "a", "max_tokens": 20, "temperature": 0, "stream": True, "ignore_eos": True}
    texts = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(request(body))
            received = b""
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                byte = connection.recv(1)
                assert byte
                received += byte
        events = [line.removeprefix(b"data: ") for line in received.splitlines() if line.startswith(b"data: {")]
        texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
    whole = server.post("/v1/completions", **(body | {"stream": False}))["choices"][0]["text"]
    assert texts == [whole, whole]


def test_ids_that_are_used_twice(server):
    """case 69: over HTTP both are served; gRPC refuses the second while the first runs."""
    answers: list[dict] = []

    def ask(text: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": text, "max_tokens": 20, "temperature": 0, "ignore_eos": True}),
            {"Authorization": f"Bearer {KEY}", "X-Request-Id": "twice"})
        answers.append(json.loads(connection.getresponse().read()))
        connection.close()

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("first", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [answer["id"] for answer in answers] == ["cmpl-twice"] * 2
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
    with server.client() as client:
        first = client.stream("first", max_tokens=100, ignore_eos=True, request_id="twice")
        begun = next(first)  # of more than one token when this client was slow to read it
        with pytest.raises(RequestError, match="twice"):
            list(client.stream("other", max_tokens=2, request_id="twice"))
        assert sum(len(event.token_ids) for event in (begun, *first)) == 100


def test_sockets_that_are_half_open(server):
    beginnings = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ",
                  request({"prompt": "x"}, length=1000), b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100,
                  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
    with contextlib.ExitStack() as stack:
        for port in (server.port, server.grpc_port):
            for beginning in beginnings * 8:
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
                connection.sendall(beginning)
        assert status(server, {"prompt": "b", "max_tokens": 3}) == 200
        with server.client() as client:
            assert len(client.generate("b", max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids) == 3
        files = server.num_files()
    server.wait_until(lambda: server.num_files() < files - len(beginnings))


def test_clients_that_vanish_without_a_word(server):
    """No orderly end of the connection, but a reset, while their requests wait, are read, and are answered."""
    for body, read in (({"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}, 100),
                       ({"prompt": "a", "max_tokens": 100, "n": 3, "ignore_eos": True}, 0), ({"prompt": "x" * 99}, 0)):
        for _ in range(5):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            connection.sendall(request(body))
            assert not read or connection.recv(read)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.close()
    for _ in range(5):
        channel = grpc.insecure_channel(server.target)
        client = Client(server.target, token=KEY)
        next(client.stream("a", max_tokens=100, ignore_eos=True))
        client.close()
        channel.close()


def test_sigterm_within_streams(tiny_files, xla_cache):
    """Streams on both ports end as if nothing were, newcomers are refused, and the process ends with 0."""
    with server_process(tiny_files, **tiny.ENGINE, compilation_cache_dir=xla_cache, drain_seconds=PATIENCE) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": "a", "max_tokens": 110, "stream": True, "ignore_eos": True}))
        answer = connection.getresponse()
        lines = [answer.readline()]
        with server.client() as client:
            stream = client.stream("b", max_tokens=110, ignore_eos=True)
            events = [next(stream)]
            server.signal(signal.SIGTERM)
            server.wait_until(lambda: "draining" in server.said)
            with contextlib.suppress(urllib.error.URLError):  # closed already, if the streams were quick
                server.post("/v1/completions", prompt="c")
                raise AssertionError("a request was taken while draining")
            lines += answer.readlines()
            events += stream
        connection.close()
        assert lines[-2] == b"data: [DONE]\n" and b'"finish_reason":"length"' in b"".join(lines)
        assert events[-1].finish_reason == "length" and sum(len(event.token_ids) for event in events) == 110
        assert server.exit_code() == 0
