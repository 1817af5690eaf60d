"""Ctrl-C on a command that works."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

OPTIONS = ("--max-model-len", "256", "--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--page-size", "16",
           "--num-pages", "20", "--ignore-eos", "--max-tokens", "200")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process alone")
def test_generate_ends_with_exit_code_130_and_no_traceback(tiny_model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n" * 2000)  # minutes of work
    command = [sys.executable, "-m", "jaxserve", "generate", str(tiny_model), "--prompt-file", str(prompts), *OPTIONS,
               "--compilation-cache-dir", str(tmp_path / "xla")]
    # A shell's background job ignores the signal, and so would its children.
    restore = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, restore)
    with process:
        assert process.stderr is not None and process.stdout is not None
        log = []
        while "ready in" not in "".join(log[-1:]):
            log.append(process.stderr.readline())
            assert log[-1], f"the command ended: {log}"
        while True:
            process.send_signal(signal.SIGINT)
            try:
                out, rest = process.communicate(timeout=20)
                break
            except subprocess.TimeoutExpired:  # lost in jax's callback of the garbage collector: a user presses again
                continue
        assert process.returncode == 130
        assert out == ""
    assert "Traceback" not in rest
    assert rest.splitlines()[-1] == "interrupted"
