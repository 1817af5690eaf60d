"""What cannot work ends with exit code 2 and one line that says why: no traceback, in a process as users start it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def jaxserve(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jaxserve", *map(str, args)], env=os.environ | environment,
                          capture_output=True, text=True)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The error, of a command that must have failed with one."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Error: "))
    return line


@pytest.mark.parametrize("command", [("info",), ("generate", "--prompt", "a")], ids=lambda command: command[0])
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_jax_cannot_use(tiny_model, command, platform):
    error = refused(jaxserve(command[0], tiny_model, *command[1:], JAX_PLATFORMS=platform))
    assert f"JAX_PLATFORMS={platform}" in error and "JAX_PLATFORMS=cpu" in error


@pytest.mark.parametrize("command", [("info",), ("generate", "--prompt", "a")], ids=lambda command: command[0])
def test_an_engine_larger_than_the_memory_is_refused_before_anything_is_loaded(tiny_model, command):
    error = refused(jaxserve(command[0], tiny_model, *command[1:], "--max-num-seqs", 1 << 16, "--decode-steps",
                             256, "--max-logprobs", 256, "--max-num-batched-tokens", 1 << 20))
    assert "max_num_seqs=65536" in error and "too little; lower max_num_seqs" in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_full_disk(tiny_model, as_json):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "jaxserve", "generate", str(tiny_model), "--prompt", "a", "--max-tokens", "2",
             *as_json], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: cannot write: No space left on device"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_address_space_that_is_too_small(tiny_model):
    """As ulimit -v makes it: 300 MiB more than jax has taken, of which 500 MiB are for the sequences."""
    resource = pytest.importorskip("resource")
    script = f"""
import resource, sys, jax
from jaxserve.cli.main import main
jax.devices()
taken = int(open("/proc/self/statm").read().split()[0]) * {resource.getpagesize()}
resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20), resource.RLIM_INFINITY))
main(["generate", {str(tiny_model)!r}, "--prompt", "a", "--max-num-seqs", "65536"])
"""
    error = refused(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True))
    assert "max_num_seqs=65536" in error and "lower max_num_seqs" in error
