"""The SMG gateway (`pip install smg`, in an environment of its own) in front of our server: an OpenAI API that nobody
here wrote, over vllm.grpc.engine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.serving.grpc.harness import PATIENCE, wait_until

pytestmark = pytest.mark.slow


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
def gateway(parrot_server, tmp_path_factory):
    """Its URL. It has nothing of the model: the tokenizer comes from our server."""
    if (smg := shutil.which("smg")) is None:
        pytest.skip("smg is not on the PATH")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
               "--worker-urls", f"grpc://{parrot_server.target}", "--backend", "vllm"]
    with (tmp_path_factory.mktemp("smg") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

        def ready() -> bool:
            assert process.poll() is None, "the gateway has ended"
            try:
                return bool(ask(f"{url}/v1/completions", prompt="a", max_tokens=1))
            except OSError:  # refused, or an HTTP error while it gets to know our server
                return False

        try:
            wait_until(ready)
            yield url
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


def test_chat_streams(gateway):
    body = ask(f"{gateway}/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4,
               temperature=0, stream=True, stream_options={"include_usage": True}).decode()
    *events, done = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons in (["length"], ["stop"])
    assert chunks[-1]["usage"]["prompt_tokens"] > 0


def test_errors_keep_their_message(gateway):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(f"{gateway}/v1/completions", prompt="a", max_tokens=5000)
    assert caught.value.code == 400
    assert b"max_model_len 512" in caught.value.read()
    caught.value.close()
