"""Everything about the server but generation: keys, ids, sizes, state, numbers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxserve
from jaxserve.serving.http.bodies import Bodies
from tests.serving.http.conftest import TIMEOUT, serving

COMPLETION = {"prompt": "Hello", "max_tokens": 1}


def samples(http) -> dict[str, float]:
    """Metrics without labels: name -> value, of several with the same name the sum."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


# -- facts


def test_models(server, client):
    model, = client.models.list()
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "jaxserve", 128)
    assert client.models.retrieve("tiny") == model


def test_state(server, http):
    server.wait_until_idle()
    for path in ("/health", "/ping"):
        assert (http.get(path).status_code, http.get(path).json()) == (200, {"status": "ready"})
    assert http.get("/load").json() == {"server_load": 0, "waiting": 0, "waiting_tokens": 0}
    assert http.get("/version").json() == {"version": jaxserve.__version__}


def test_tokenize_and_detokenize(server, http):
    text = "H\N{LATIN SMALL LETTER E WITH ACUTE}!"
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    ids = list(text.encode())
    assert answer == {"count": 4, "max_model_len": 128, "tokens": ids,
                      "token_strs": server.llm.tokenizer.convert_ids_to_tokens(ids)}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == server.llm.chat_token_ids(messages)
    answer = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert answer["tokens"] == server.llm.chat_token_ids(messages, add_generation_prompt=False)
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": [1]}), ("/detokenize", {"tokens": "a"}),
                       ("/detokenize", {"tokens": [-1]}), ("/tokenize", {"prompt": "a", "x": 1})):
        assert http.post(path, json=body).status_code == 400


def test_metrics(http):
    before = samples(http)
    answer = http.post("/v1/completions", json={"prompt": ["Hello", "ab"], "max_tokens": 3, "n": 2,
                                                "ignore_eos": True}).json()
    http.post("/v1/completions", json={"prompt": ""})
    after = samples(http)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert gained("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"] == 7
    assert gained("vllm:generation_tokens_total") == 12
    assert gained("vllm:request_success_total") == 4
    assert gained("vllm:admission_rejections_total") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prompt_tokens", "request_params_n"):
        assert gained(f"vllm:{name}_count") == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0 and after["vllm:cache_config_info"] == 1
    assert after["jaxserve:pages_free"] == 27 == after["jaxserve:pages"], "the latter in all states together"
    assert after["jaxserve:token_rows_padded_total"] >= after["jaxserve:token_rows_total"] > 0


# -- who may call


def test_keys(server):
    with serving(server.llm, api_keys=["one", "two"]) as locked, locked.http() as http:
        assert http.get("/health").status_code == http.get("/ping").status_code == 200
        for path in ("/v1/models", "/metrics", "/load", "/version", "/nothing"):
            answer = http.get(path)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            for header in ("Bearer three", "Bearer", "Basic one", "one", "Bearer on", "Bearer \xe9"):
                answer = http.post(path, json=COMPLETION, headers={"Authorization": header.encode("latin-1")})
                assert answer.status_code == 401
        for key in ("one", "two"):
            with locked.client(api_key=key) as client:
                assert client.completions.create(model="tiny", **COMPLETION).usage.completion_tokens == 1
        with locked.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_other_origins_are_refused_unless_allowed(server, http):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asked).headers
    assert "access-control-allow-origin" not in http.get("/health", headers=asked).headers
    with serving(server.llm, cors_allow_origins=["https://example.org"], api_keys=["one"]) as open_to, \
            open_to.http() as other:
        answer = other.options("/v1/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert other.options("/v1/completions", headers=asked | {"Origin": "https://example.com"}).status_code == 400


# -- request ids


def test_request_ids(http):
    answer = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "my-id.7"})
    assert answer.headers["x-request-id"] == "my-id.7" and answer.json()["id"] == "cmpl-my-id.7"
    assert len(http.get("/health").headers["x-request-id"]) == 32


@pytest.mark.parametrize("given", ["x" * 129, "a b", "\xe9", "<script>", "a\tb"])
def test_request_ids_that_are_not_repeated(http, given):
    """case 71"""
    answer = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": given.encode("latin-1")})
    assert answer.status_code == 200
    assert given not in answer.headers["x-request-id"] and given not in answer.text


def test_a_huge_request_id(http):
    """case 71"""
    try:
        answer = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "x" * 2**20})
        assert answer.status_code in (400, 431) and "xxx" not in answer.text
    except httpx.TransportError:  # the server closed the connection while the client was still sending
        pass
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_equal_request_ids_do_not_mix(server, http):
    """case 69"""
    same = {"X-Request-Id": "same"}
    body = {"max_tokens": 30, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body | {"prompt": "abc"}, headers=same) as first, \
            http.stream("POST", "/v1/completions", json=body | {"prompt": "xyz"}, headers=same) as second:
        texts = ["".join(first.iter_text()), "".join(second.iter_text())]
    assert all("cmpl-same" in text for text in texts) and texts[0] != texts[1]


# -- sizes


def test_large_bodies(server):
    with serving(server.llm, max_body_bytes=1000) as small, small.http() as http:
        for size, status in ((700, 400), (2000, 413)):  # 700 are too long for the model only
            answer = http.post("/v1/completions", json={"prompt": "x" * size})
            assert answer.status_code == status and answer.json()["error"]["message"]
        chunked = http.post("/v1/completions", content=(b"x" * 100 for _ in range(1000)))
        assert chunked.status_code == 413
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server, expect):
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
                           % (expect, 2**40))
        answer = b""
        while b"body_too_large" not in answer:
            assert (received := connection.recv(4096))
            answer += received
        assert answer.startswith(b"HTTP/1.1 413") and b"\r\nconnection: close\r\n" in answer.lower()
        # It may be read by somebody who is still sending; nothing that comes now is taken for a request.
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1" not in b"".join(iter(lambda: connection.recv(4096), b""))


def test_large_bodies_are_held_a_few_at_a_time(server, monkeypatch):
    """Small ones are served meanwhile."""
    held: list[int] = []
    hold = Bodies._hold
    monkeypatch.setattr(Bodies, "_hold", lambda bodies, more: (hold(bodies, more), held.append(more)))
    with serving(server.llm, max_body_bytes=200_000) as small, small.http() as http, contextlib.ExitStack() as stack:
        beginning = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b" " * 199_999
        body = {"prompt": "x" * 150_000}
        for _ in range(4):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), TIMEOUT))
            connection.sendall(beginning)
        while sum(held) < 4 * 199_999:
            pass
        answer = http.post("/tokenize", json=body)
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        stack.close()
        while http.post("/tokenize", json=body).status_code == 429:
            pass
        assert http.post("/tokenize", json=body).json()["count"] == 150_000


def test_only_a_late_body_is_late(server, http, monkeypatch):
    async def generate(*_, **__):
        raise TimeoutError("ours")

    monkeypatch.setattr(server.service, "generate", generate)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 500


def test_a_body_of_64_megabytes(http):
    try:
        answer = http.post("/v1/completions", content=b"x" * (64 << 20))
        assert answer.status_code == 413
    except httpx.TransportError:  # the server closed the connection while the client was still sending
        pass
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_body_that_does_not_come_before_the_server_stops(server, monkeypatch, caplog):
    monkeypatch.setattr("jaxserve.serving.http.server.PATIENCE_SECONDS", 0.1)
    with contextlib.ExitStack() as stack:
        with serving(server.llm) as small, small.http() as http:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), TIMEOUT))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{")
            assert http.get("/health").status_code == 200  # both have come
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503") and b'"the server shuts down"' in answer
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def test_sockets_that_say_nothing_disturb_nobody(server, http):
    """Half-open ones too: a request whose body never comes."""
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address) for _ in range(20)]
    half = [socket.create_connection(address) for _ in range(20)]
    for connection in half:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    for connection in silent + half:
        connection.close()
    server.wait_until_idle()
    assert http.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_connections_without_a_request_are_closed(server, said):
    with serving(server.llm, idle_seconds=0.1) as small:
        with socket.create_connection(("127.0.0.1", small.port), TIMEOUT) as connection:
            connection.sendall(said)
            assert connection.recv(1) == b""
        with socket.create_connection(("127.0.0.1", small.port), TIMEOUT) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + said)  # and after one, likewise
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"status":"ready"}')


@pytest.mark.parametrize("said", [
    b"no request\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
def test_what_is_no_http_is_told_so_in_the_apis_form(server, http, said):
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        connection.sendall(said)
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_passed_over(http, caplog, protocol):
    answer = http.get("/health", headers={"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol})
    assert answer.status_code == 200 and not caplog.records


def test_an_answer_may_take_longer_than_an_idle_connection(server, monkeypatch):
    with serving(server.llm, idle_seconds=0.05) as small, small.http() as http:
        step = server.llm._core.step
        monkeypatch.setattr(server.llm._core, "step", lambda: (threading.Event().wait(0.02), step()))
        answer = http.post("/v1/completions", json=COMPLETION | {"max_tokens": 20, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 20


def test_the_number_of_connections_is_bounded(server):
    with serving(server.llm, max_connections=2) as small:
        address = ("127.0.0.1", small.port)
        with socket.create_connection(address, TIMEOUT), socket.create_connection(address, TIMEOUT) as second:
            second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert second.recv(8) == b"HTTP/1.1"
            with socket.create_connection(address, TIMEOUT) as third:
                with contextlib.suppress(ConnectionResetError):
                    assert third.recv(1) == b""
            second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert second.recv(8)


# -- too much at once


def test_a_full_queue(server):
    with serving(server.llm, {"max_waiting_tokens": 100}) as small, small.http() as http, \
            small.client() as client:
        # One alone may be larger than the bound.
        assert http.post("/v1/completions", json={"prompt": "x" * 110, "max_tokens": 1}).status_code == 200
        small.service._waiting["somebody else"] = 60
        answer = http.post("/v1/completions", json={"prompt": "x" * 50, "max_tokens": 1, "stream": True})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt=["x" * 30, "x" * 50])
        del small.service._waiting["somebody else"]
        assert http.post("/v1/completions", json={"prompt": "x" * 50, "max_tokens": 1}).status_code == 200
        assert small.service.num_active == small.service.num_waiting == 0
