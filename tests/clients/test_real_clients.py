"""Clients that nobody here wrote, unchanged, against a server process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import ENVIRONMENTS, run

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent


@pytest.mark.parametrize(("script", "requirement"), [
    ("openai_python.py", "openai>=3"), ("langchain_openai_client.py", "langchain-openai"),
    # 1.107.0 was published with malware.
    ("litellm_client.py", "litellm!=1.107.0")])
def test_python_clients(server, environment, script, requirement):
    python = environment(Path(script).stem, requirement) / "python"
    print(run(python, HERE / script, f"{server.url}/v1", server.key, cwd="/"))


def test_openai_for_node(server):
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    directory = ENVIRONMENTS / "node"
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "node_modules" / "openai").exists():
        run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", directory, "openai")
    shutil.copy(HERE / "openai_node.mjs", directory)  # imports are looked up beside the file
    print(run("node", directory / "openai_node.mjs", f"{server.url}/v1", server.key))


def test_llm(server, environment, tmp_path):
    """The command line tool of that name, by its file of OpenAI-compatible models."""
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(
        f"- model_id: {name}\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: tiny\n  {kind}"
        for name, kind in (("tiny-chat", "can_stream: true"), ("tiny-text", "completion: true"))))
    (tmp_path / "keys.json").write_text(json.dumps({"tiny": server.key}))
    llm = environment("llm", "llm") / "llm"
    env = os.environ | {"LLM_USER_PATH": str(tmp_path)}
    for stream in ([], ["--no-stream"]):
        assert run(llm, "-m", "tiny-chat", "Hi", "-o", "temperature", "0", *stream, env=env).strip() == "WORLD"
    assert run(llm, "-m", "tiny-text", "a", "-o", "temperature", "0", "-o", "max_tokens", "5",
               env=env).strip() == "bcdef"
    assert run(llm, "-m", "tiny-chat", "-c", "And?", "-o", "temperature", "0", env=env).strip() == "WORLD"


def test_buf_curl(server, environment):
    """A client that knows the protocols by reflection alone."""
    buf = environment("buf", "buf-bin") / "buf"

    def call(method: str, **message: object) -> list[dict]:
        key = f"Authorization: Bearer {server.key}"
        said = run(buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--header", key, "--reflect-header",
                   key, "--data", json.dumps(message), f"http://{server.target}/{method}")
        decoder, found, rest = json.JSONDecoder(), [], said.strip()
        while rest:
            value, end = decoder.raw_decode(rest)
            found.append(value)
            rest = rest[end:].strip()
        return found

    messages = call("jaxserve.v1.Inference/Generate", text="a", sampling={"temperature": 0, "max_tokens": 5})
    assert "".join(message.get("text", "") for message in messages) == "bcdef"
    assert call("jaxserve.v1.Inference/Tokenize", text="ab")[0]["tokenIds"] == [97, 98]
    assert call("grpc.health.v1.Health/Check") == [{"status": "SERVING"}]
    assert call("vllm.grpc.engine.VllmEngine/GetModelInfo")[0]["maxContextLength"] == 512

