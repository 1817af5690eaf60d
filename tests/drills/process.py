"""A server in a process of its own, as a stranger runs and watches it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file

from jaxserve.client import Client
from tests.llm import tiny

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds; the machine may stand still for a while


class ServerProcess:
    """`scripts/serve.py MODEL`, ready.

    Attributes:
        url: of the HTTP server; target: host and port of the gRPC one.
        log: what it has said so far.
    """

    def __init__(self, model: str, key: str | None = None, **options: object):
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, self.grpc_port = one.getsockname()[1], other.getsockname()[1]
        self.url, self.target = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.grpc_port}"
        self.key = key
        options |= {"port": self.port, "grpc_port": self.grpc_port} | ({} if key is None else {"api_key": key})
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "serve.py"), model,
             *(f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items())],
            stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        ready = threading.Event()
        # A pipe that nobody reads would fill, and the server would wait for it.
        self._reader = threading.Thread(target=self._read_log, args=(ready,), daemon=True)
        self._reader.start()
        ready.wait(PATIENCE)
        if "service: ready" not in self.said:
            self.kill()
            raise AssertionError(self.said)

    def _read_log(self, ready: threading.Event) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            if "service: ready" in line:
                ready.set()
        ready.set()

    @property
    def said(self) -> str:
        return "".join(self.log)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: object) -> dict:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json", **self.headers})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def client(self, **options) -> Client:
        return Client(self.target, token=self.key, **options)

    def metrics(self) -> dict[str, float]:
        """Name, or name{label=value} for each label but the model's -> value. Histograms' buckets are left out."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                labels = "".join(f"{{{name}={value}}}" for name, value in sample.labels.items() if name != "model_name")
                if not sample.name.endswith("_bucket"):
                    found[sample.name + labels] = sample.value
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """For what only polling can tell."""
        while not condition():
            assert self._process.poll() is None, self.said
            threading.Event().wait(0.05)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: set(json.loads(self.get("/load")).values()) == {0})

    def assert_nothing_is_held(self, pages: float) -> None:
        """Every gauge is back at zero, and all of `pages` are free."""
        self.wait_until_idle()
        numbers = self.metrics()
        assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == 0
        assert numbers["vllm:kv_cache_usage_perc"] == 0
        assert numbers["jaxserve:pages_free"] == pages

    def memory(self) -> int:
        """Bytes that it has written to: in memory, or where the system has moved what lay idle."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/task").iterdir()))

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        self._process.kill()
        self.exit_code()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextlib.contextmanager
def server_process(model: str | Path, **options) -> Iterator[ServerProcess]:
    """Ends with SIGTERM, unless it has ended, and checks that it ended well."""
    server = ServerProcess(str(model), **options)
    try:
        yield server
        server.signal()
        assert server.exit_code() == 0, server.said
        assert "Traceback" not in server.said, server.said
    finally:
        server.kill()


def write_tiny(directory: Path) -> None:
    """The tiny model of tests/llm as files."""
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    save_file(tiny.random_tensors(), directory / "model.safetensors")
    tiny.tokenizer().save(directory)
