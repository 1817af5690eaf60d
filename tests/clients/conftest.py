"""A server for clients that nobody here wrote, and an environment for each of them under build/clients."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.drills.process import PATIENCE, ROOT, ServerProcess, server_process
from tests.llm import tiny

ENVIRONMENTS = ROOT / "build" / "clients"


@pytest.fixture(scope="session")
def parrot_files(tmp_path_factory) -> Path:
    """A model that says the alphabet after "a", "é🎉]" after "[", and WORLD to a chat."""
    directory = tmp_path_factory.mktemp("parrot")
    chains = ([*b"abcdefghijklmnopqrstuvwxyz", tiny.EOS], [*b" WORLD", tiny.END_OF_TURN], "[é🎉]".encode())
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny.EOS, tiny.END_OF_TURN]}))
    save_file(tiny.parrot_tensors(*chains), directory / "model.safetensors")
    tiny.tokenizer().save(directory)
    return directory


ENGINE = tiny.ENGINE | {"max_num_seqs": 8, "num_pages": 200, "max_model_len": 512}


@pytest.fixture(scope="session")
def server(parrot_files) -> Iterator[ServerProcess]:
    """With a key."""
    with server_process(parrot_files, key="a-key", served_model_name="tiny", **ENGINE) as server:
        yield server
        server.assert_nothing_is_held(199)


@pytest.fixture(scope="session")
def environment() -> Callable[..., Path]:
    """`environment(name, *requirements)` is the folder of programs of an environment that has them, made once."""
    def make(name: str, *requirements: str) -> Path:
        directory = ENVIRONMENTS / name
        made, wanted = directory / "made-of", "\n".join(requirements)
        if not made.exists() or made.read_text() != wanted:
            venv.create(directory, clear=True, with_pip=False)
            run(sys.executable, "-m", "pip", "--python", directory / "bin" / "python", "--disable-pip-version-check",
                "-qq", "install", *requirements)
            made.write_text(wanted)
        return directory / "bin"

    return make


def run(*command: str | Path, **options) -> str:
    """What it prints. Fails with all that it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
