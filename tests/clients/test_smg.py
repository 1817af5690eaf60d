"""The SMG gateway in front of our gRPC port: an OpenAI API that nobody here wrote, over vllm.grpc.engine. It has
nothing of the model: the tokenizer comes from our server."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.clients.conftest import ENGINE
from tests.drills.process import PATIENCE, server_process

pytestmark = pytest.mark.clients


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(url: str, **body) -> bytes:
    request = urllib.request.Request(url, json.dumps({"model": "tiny", **body}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.read()


@pytest.fixture(scope="module")
def gateway(parrot_files, environment, tmp_path_factory):
    """Its URL."""
    smg, port = environment("smg", "smg") / "smg", free_port()
    url = f"http://127.0.0.1:{port}"
    with server_process(parrot_files, served_model_name="tiny", **ENGINE) as server:
        command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
                   "--worker-urls", f"grpc://{server.target}", "--backend", "vllm"]
        with (tmp_path_factory.mktemp("smg") / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)

            def ready() -> bool:
                assert process.poll() is None, "the gateway has ended"
                try:
                    return bool(ask(f"{url}/v1/completions", prompt="a", max_tokens=1))
                except OSError:  # refused, or an HTTP error while it gets to know our server
                    return False

            try:
                server.wait_until(ready)
                yield url
                server.assert_nothing_is_held(199)
            finally:
                process.terminate()
                process.wait(PATIENCE)


def test_completions(gateway):
    answer = json.loads(ask(f"{gateway}/v1/completions", prompt="a", temperature=0, max_tokens=5))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("bcdef", "length")
    assert answer["usage"]["completion_tokens"] == 5


def test_stop_strings_and_several_choices(gateway):
    answer = json.loads(ask(f"{gateway}/v1/completions", prompt="a", temperature=0, stop=["fgh"], n=2))
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, "bcde", "stop"), (1, "bcde", "stop")]


def test_characters_of_several_tokens_survive(gateway):
    assert json.loads(ask(f"{gateway}/v1/completions", prompt="[", temperature=0, max_tokens=7))["choices"][0][
        "text"] == "é🎉]"


@pytest.mark.parametrize("stream", [False, True])
def test_chats(gateway, stream):
    body = ask(f"{gateway}/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], temperature=0,
               stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})).decode()
    if not stream:
        choice, = json.loads(body)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("WORLD", "stop")
        return
    *events, done = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "WORLD"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"]["prompt_tokens"] > 0


def test_errors_keep_their_message(gateway):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(f"{gateway}/v1/completions", prompt="a", max_tokens=5000)
    assert caught.value.code == 400
    assert b"max_model_len 512" in caught.value.read()
    caught.value.close()
