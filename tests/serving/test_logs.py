"""The server's log: one line a call, never twice, parseable when asked for, and silent on what is private."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import subprocess
import sys

import grpc
import pytest
from click.testing import CliRunner

from jaxserve import ConfigError, RequestError
from jaxserve.cli.main import main
from jaxserve.client import Client, ServerError
from jaxserve.serving.config import ServeConfig
from jaxserve.serving.http.app import HttpOptions
from jaxserve.serving.logs import AccessLog, JsonFormatter
from jaxserve.serving.protos.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from tests.drills.process import PATIENCE, server_process
from tests.llm import tiny
from tests.serving.certificates import Authority
from tests.serving.grpc.harness import Loop, running
from tests.serving.http.conftest import serving


@pytest.fixture
def log(caplog):
    """Parsed lines of the access log."""
    caplog.set_level(logging.INFO, "jaxserve.access")

    def parsed() -> list[dict]:
        return [json.loads(JsonFormatter().format(record)) for record in caplog.records
                if record.name == "jaxserve.access"]

    return parsed


def test_a_line_for_each_call(make_llm, log):
    with make_llm() as llm, serving(llm, access_log=AccessLog()) as server, server.http() as http:
        body = {"prompt": ["very private", "x"], "max_tokens": 3, "ignore_eos": True, "stream": True}
        http.post("/v1/completions?key=hidden", json=body,
                  headers={"X-Request-Id": "mine", "Authorization": "Bearer hidden"})
        http.post("/v1/completions", json={"prompt": "very private", "max_tokens": 0})
        http.get("/health"), http.get("/metrics"), http.get("/no%0d%0asuch/path")
    # A stream's line is written when its connection is done with, which may be after the client's next call.
    done, refused, missing = sorted(log(), key=lambda line: line["status"])
    assert done["request_id"] == "mine" and (done["method"], done["status"]) == ("POST /v1/completions", 200)
    assert (done["prompt_tokens"], done["completion_tokens"], done["cached_tokens"]) == (13, 6, 0)
    assert done["finish_reasons"] == ["length", "length"] and done["client"].startswith("127.0.0.1:")
    assert 0 < done["queue_seconds"] < done["first_token_seconds"] < done["seconds"]
    assert refused["status"] == 400 and "prompt_tokens" not in refused
    assert missing["method"] == "GET /no%0d%0asuch/path" and missing["status"] == 404
    assert "private" not in str(log()) and "hidden" not in str(log())


def test_texts_are_logged_when_asked_for(make_llm, log):
    with make_llm() as llm, serving(llm, access_log=AccessLog(log_prompts=True)) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "very\nprivate", "max_tokens": 3}).json()
    line, = log()
    assert line["prompts"] == ["very\nprivate"] and line["answers"] == [answer["choices"][0]["text"]]
    assert "\n" not in line["message"]


def test_calls_of_grpc(make_llm, log):
    loop = Loop()
    with make_llm() as llm, running(loop, llm, access_log=AccessLog()) as server, Client(server.target) as client:
        client.generate("private", max_tokens=3, ignore_eos=True, use_tqdm=False)
        with pytest.raises(RequestError):
            client.generate("private" * 100, use_tqdm=False)
        client.tokenize("private")
        client.abort("nobody")
        with grpc.insecure_channel(server.target) as channel:
            engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
            engine.GetLoads(vllm_engine_pb2.GetLoadsRequest())
            with pytest.raises(grpc.RpcError):
                engine.Embed(vllm_engine_pb2.EmbedRequest())
    loop.close()
    done, refused, text, abort, embed = log()
    assert (abort["method"], abort["status"]) == ("/jaxserve.v1.Inference/Abort", "OK")
    assert (embed["method"], embed["status"]) == ("/vllm.grpc.engine.VllmEngine/Embed", "UNIMPLEMENTED")
    assert (done["method"], done["status"]) == ("/jaxserve.v1.Inference/Generate", "OK")
    assert (done["prompt_tokens"], done["completion_tokens"]) == (7, 3) and done["request_id"]
    assert refused["status"] == "INVALID_ARGUMENT"
    assert (text["method"], text["status"]) == ("/jaxserve.v1.Inference/Tokenize", "OK")
    assert "private" not in str(log())


def test_calls_of_grpc_without_a_token(make_llm, log):
    loop = Loop()
    with make_llm() as llm, running(loop, llm, access_log=AccessLog(), tokens=["hidden"]) as server, \
            Client(server.target, token="wrong") as client, pytest.raises(ServerError):
        client.tokenize("private")
    loop.close()
    line, = log()
    assert (line["method"], line["status"]) == ("/jaxserve.v1.Inference/Tokenize", "UNAUTHENTICATED")
    assert "127.0.0.1" in line["client"] and not {"wrong", "hidden"} & set(str(line).split())


def test_keys_are_in_no_representation():
    assert "hidden" not in repr(ServeConfig(api_key=["hidden"])) + repr(HttpOptions(api_keys=["hidden"]))
    with pytest.raises(ConfigError) as caught:
        ServeConfig(api_key=["hidden", ""])
    assert "hidden" not in str(caught.value)


def test_an_empty_list_of_keys_is_no_list_of_keys():
    with pytest.raises(ConfigError, match="api_key is an empty list"):
        ServeConfig(api_key=[])


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\n"])
def test_keys_that_no_header_can_carry(key):
    with pytest.raises(ConfigError, match="api_key must be of printable ASCII") as caught:
        ServeConfig(api_key=[key])
    assert key not in str(caught.value)


def test_prompts_need_lines_to_be_in():
    with pytest.raises(ConfigError, match="log_prompts needs access_log"):
        ServeConfig(log_prompts=True, access_log=False)


def test_a_json_log_is_json_whoever_writes_it():
    """Also when a library gives the root logger a handler of its own, as absl does, and to the last line."""
    program = """
import logging, sys, warnings
from jaxserve.cli.main import main
from jaxserve.serving import lifecycle

def serve(*args):
    logging.getLogger("jaxserve.serving").info("ours %s", "\\u00e9")
    logging.getLogger("uvicorn.error").warning("theirs")
    warnings.warn("deprecated")
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("jaxserve.serving").exception("with a traceback")
    from jaxserve import ConfigError
    raise ConfigError("the model is not there")

lifecycle.serve = serve
main(["serve", "m", "--log-format", "json"])
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert process.returncode == 2
    assert [line["message"] for line in lines if line["logger"] != "py.warnings"] == [
        "ours é", "theirs", "with a traceback", "the model is not there"]
    assert "deprecated" in lines[2]["message"] and "ValueError: inner" in lines[3]["traceback"]
    assert {line["level"] for line in lines} == {"INFO", "WARNING", "ERROR"}


def test_the_core_of_grpc_writes_no_lines_that_are_no_json(tiny_files, tmp_path):
    certificate, key = Authority(tmp_path / "ca").sign("server")
    with server_process(tiny_files, **tiny.ENGINE, log_format="json", compile_mode="lazy", ssl_certfile=certificate,
                        ssl_keyfile=key) as server:
        with socket.create_connection(("127.0.0.1", server.grpc_port), PATIENCE) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no handshake
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    for line in server.said.splitlines():
        json.loads(line)


def test_the_log_of_a_server_that_is_bothered(tiny_files):
    """uvicorn's lines have the log's form too."""
    for log_format in ("json", "text"):
        with server_process(tiny_files, **tiny.ENGINE, log_format=log_format, compile_mode="lazy") as server:
            for port in (server.port, server.grpc_port):
                for said in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"no request\r\n\r\n"):
                    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
                        connection.sendall(said)
                        with contextlib.suppress(ConnectionResetError):
                            while connection.recv(4096):
                                pass
            server.wait_until(lambda: server.said.count("Invalid HTTP request received.") == 2)
        for line in server.said.splitlines():
            if log_format == "json":
                json.loads(line)
            else:
                assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO|WARNING) ", line), line


def test_a_line_comes_once_although_the_root_logger_has_a_handler(monkeypatch, caplog):
    from jaxserve.serving import lifecycle

    def serve(*args) -> int:
        logging.getLogger("jaxserve.serving").info("once")
        return 0

    monkeypatch.setattr(lifecycle, "serve", serve)
    result = CliRunner().invoke(main, ["serve", "m"])
    assert (result.output + result.stderr).count("once") in (1, 2)  # click's output may hold stderr
    assert result.stderr.count("once") == 1 and "once" not in caplog.text
    logging.getLogger("jaxserve.serving").warning("afterwards")
    assert "afterwards" in caplog.text, "the command leaves the loggers as they were"
