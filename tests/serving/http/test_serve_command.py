"""`jaxserve serve` and scripts/serve.py: options, signals, exit codes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import httpx2 as httpx
import openai
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import save_file

from jaxserve.cli.main import main
from jaxserve.client import Client, ServerError
from jaxserve.serving import lifecycle
from jaxserve.serving.config import ServeConfig, read_config_file
from jaxserve.serving.lifecycle import Loader
from jaxserve.serving.listening import bind
from tests.llm import tiny
from tests.serving.http.conftest import TIMEOUT

ROOT = Path(__file__).parents[3]


# -- options: all of this before a model is loaded


def serve(*args) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["serve", "/no/such/model", *map(str, args)])
    return result.exit_code, " ".join((result.output + result.stderr).split())


@pytest.mark.parametrize(("args", "message"), [
    (["--port", "70000"], "port must be an integer from 0 to 65535"),
    (["--port", "0", "--grpc-port", "0"], "there would be no server"),
    (["--port", "50051"], "they must differ"),
    (["--ssl-certfile", "/no/file"], "go together"),
    (["--ssl-certfile", "/no/file", "--ssl-keyfile", "/no/file"], "no file /no/file"),
    (["--drain-seconds", "-1"], "drain_seconds"),
    (["--api-key", ""], "api_key"),
    (["--ssl-client-ca", __file__], "ssl_client_ca needs ssl_certfile"),
    (["--idle-seconds", "0"], "idle_seconds must be a number of at least 1"),
    (["--max-connections", "0"], "max_connections must be an integer"),
    (["--grpc-max-message-bytes", "0"], "grpc_max_message_bytes must be an integer"),
    (["--grpc-keepalive-seconds", "0"], "grpc_keepalive_seconds must be a number"),
    (["--otlp-endpoint", "localhost:4317"], "otlp_endpoint must be a URL"),
    (["--log-prompts", "--no-access-log"], "log_prompts needs access_log"),
    (["--log-format", "xml"], "'xml' is not one of 'text', 'json'"),
    (["--page-size", "7"], "page_size must be a power of two"),
    (["--host", "no.such.host.invalid"], "cannot listen on"),
    (["--config", "/no/such/file"], "does not exist"),
])
def test_wrong_options(args, message):
    code, output = serve(*args)
    assert code == 2 and message in output


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_certificate_that_is_none(option):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, output = serve("--port", 0, "--grpc-port", 0, option, port, "--ssl-certfile", __file__, "--ssl-keyfile",
                         __file__)
    assert code == 2 and "a TLS file is of no use" in output and "/no/such/model" not in output


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_port_that_is_taken(option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output = serve("--port", 0, option, taken.getsockname()[1])
    assert code == 2 and "cannot listen" in output


@pytest.mark.parametrize(("text", "message"), [
    ("prot: 1", "unknown option(s) prot"), ("- 1", "must hold a mapping"), ("port: [", "cannot be read"),
    ("port: '8000'", "port must be an integer"), ("log_format: xml", "log_format must be text or json"),
    ("chat_page: 1", "chat_page must be true or false"), ("page_size: 7", "page_size"), ("api_key: 7", "api_key"),
    ("port: 1\nhost: a\nport: 2", "gives port more than once"), ("api-key: a\napi_key: b", "gives api_key more than")])
def test_wrong_config_files(tmp_path, text, message):
    (tmp_path / "serve.yaml").write_text(text)
    code, output = serve("--config", tmp_path / "serve.yaml")
    assert code == 2 and message in output


@pytest.mark.parametrize("text", ["", "# port: 1\n", "---\n"])
def test_a_config_file_without_options(tmp_path, text):
    (tmp_path / "serve.yaml").write_text(text)
    assert read_config_file(tmp_path / "serve.yaml") == ({}, {})


def test_a_config_file_and_options_that_count_more(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(lifecycle, "serve", lambda *args: seen.append(args) or 0)
    (tmp_path / "serve.yaml").write_text("port: 1234\napi-key: secret\npage_size: 16\nmax_num_seqs: 8\n")
    result = CliRunner().invoke(main, ["serve", "m", "--config", str(tmp_path / "serve.yaml"), "--max-num-seqs", "4",
                                       "--grpc-port", "77"])
    assert result.exit_code == 0, result.output
    assert seen == [("m", {"page_size": 16, "max_num_seqs": 4, "compile_mode": "eager"},
                     ServeConfig(port=1234, grpc_port=77, api_key=["secret"]))]


# -- life


def run_and(llm, act, before=None, **options) -> int:
    """Serves in this thread while `act(client)` runs in another one; returns the exit code. `before(client)` runs
    before the engine is there; an exception for an engine is what loading it raises."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    failures, loaded = [], threading.Event()

    def load():
        assert loaded.wait(TIMEOUT)
        if isinstance(llm, Exception):
            raise llm
        return llm

    def actor() -> None:
        try:
            with httpx.Client(base_url=url, timeout=TIMEOUT, transport=httpx.HTTPTransport(retries=1000)) as http:
                if before is not None:
                    before(http)
                loaded.set()
                while act is not None and http.get("/health").status_code != 200:
                    pass
                if act is not None:
                    act(http)
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=actor)
    thread.start()
    config = ServeConfig(**({"port": 1, "grpc_port": 0} | options))
    code = asyncio.run(lifecycle.run(Loader(load), "tiny", config, listener))
    thread.join(TIMEOUT)
    assert not failures, failures
    return code


def stream_and(http, max_tokens: int, act) -> str:
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True,
                                                      "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        act()
        return "\n".join(lines)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_ports_are_open_while_the_model_is_loaded(make_llm):
    with socket.create_server(("127.0.0.1", 0)) as free:
        grpc_port = free.getsockname()[1]

    def before(http):
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": ["a"], "stream": True}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                           ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable"), answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert http.get("/v1/models").status_code == 503
        for path in ("/metrics", "/load", "/version"):
            assert http.get(path).status_code == 200
        assert grpc_health() == "NOT_SERVING"
        with Client(f"127.0.0.1:{grpc_port}") as client, pytest.raises(ServerError) as caught:
            client.tokenize("a")
        assert caught.value.code == "UNAVAILABLE" and "starting" in str(caught.value)

    def act(http):
        while grpc_health() != "SERVING":
            pass
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        terminate()

    def grpc_health() -> str:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    with make_llm() as llm:
        assert run_and(llm, act, before, grpc_port=grpc_port) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, output = serve("--port", port, "--grpc-port", 0)
    assert code == 2 and "/no/such/model does not exist" in output


def test_sigterm_while_the_model_is_loaded_ends_the_process_at_once():
    """Loading cannot be interrupted, and is not waited for."""
    program = """
import threading
from jaxserve.serving import lifecycle
from jaxserve.serving.config import ServeConfig, read_config_file

def never(model, **options):
    print("loading", flush=True)
    threading.Event().wait()

lifecycle.LLM = never
raise SystemExit(lifecycle.serve("tiny", {}, ServeConfig(port=0, grpc_port=%d)))
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", program % port], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()


def test_sigterm_lets_streams_end(make_llm):
    def act(http):
        text = stream_and(http, 60, terminate)
        assert '"finish_reason":"length"' in text and text.rstrip().endswith("data: [DONE]")

    with make_llm() as llm:
        assert run_and(llm, act, drain_seconds=TIMEOUT) == 0


@pytest.mark.parametrize("how", ["no grace", "second signal"])
def test_sigterm_aborts_in_the_end(make_llm, monkeypatch, how):
    def act(http):
        step, steps, gate = llm._core.step, itertools.count(), threading.Event()

        def held():  # the request does not end by itself
            if next(steps) > 10:
                gate.wait(TIMEOUT)
            step()

        def stop():
            terminate()
            if how == "second signal":
                while http.get("/health").json()["status"] != "draining":
                    pass
                terminate()
            while not llm._thread._inbox:  # the abort
                pass
            gate.set()

        monkeypatch.setattr(llm._core, "step", held)
        text = stream_and(http, 120, stop)
        assert '"code":"unavailable"' in text and text.rstrip().endswith("data: [DONE]")

    with make_llm() as llm:
        assert run_and(llm, act, drain_seconds=0 if how == "no grace" else TIMEOUT) == 0


def test_a_failed_engine_ends_the_process_with_an_error(make_llm, monkeypatch):
    def act(http):
        def broken():
            raise SystemError("a bug of ours")

        monkeypatch.setattr(llm._core, "step", broken)
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code in (500, 503)

    with make_llm() as llm:
        assert run_and(llm, act) == 1


def test_the_script(tmp_path, xla_cache):
    """From the outside: a process, its ports and its exit code."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    save_file(tiny.random_tensors(), tmp_path / "model.safetensors")
    tiny.tokenizer().save(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, grpc_port = one.getsockname()[1], other.getsockname()[1]
    options = tiny.ENGINE | {"compilation_cache_dir": xla_cache, "compile_mode": "lazy", "port": port,
                             "grpc_port": grpc_port, "served_model_name": "tiny"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "serve.py"), str(tmp_path),
         *(f"--{name}={value}" for name, value in options.items())], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "service: ready" in line:
                break
        assert process.poll() is None, "".join(log)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=TIMEOUT) as client:
            answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=4)
        assert answer.usage.prompt_tokens == 5
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, "".join(log) + rest
        assert "Traceback" not in "".join(log) + rest
    finally:
        process.kill()
