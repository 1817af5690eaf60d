"""Compile an engine's programs for a device that is not there, in a process of its own. No jax here.

XLA's compilers need no device, only its description (see worker.py). They run in a subprocess, because for a
program they cannot build they may end the whole process, and because this process may be using jax for something
else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxserve.capacity.ptx import KernelUse, dump_environment, find_ptxas
from jaxserve.capacity.targets import Target, parse_target
from jaxserve.errors import how_to_install

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # an accelerator that is here may be busy, and is not needed
    # libtpu asks a metadata server which TPU it is on, and takes a lock on the machine's TPUs, unless told otherwise.
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile. Everything in it can be written as JSON.

    Attributes:
        target: as `parse_target` reads it; one of its devices is compiled for.
        config: the model's config.json.
        dtype: of the weights.
        options: of EngineConfig, by name.
        num_pages: of the KV pool.
        programs: names of the engine's programs, as `str(Program)`.
        part: "step": the whole program; "attention": only its paged attention, of one layer.
        degree: the shapes are those of one of so many devices (`footprint.share_of`).
        num_layers: None: all of the model's; else so many of them.
        backend: of attention; None: the one that the engine would take.
        kernel_use: also report registers, spills and shared memory of each CUDA kernel.
    """

    target: str
    config: Mapping[str, Any]
    dtype: str
    options: Mapping[str, Any]
    num_pages: int
    programs: Sequence[str]
    part: Literal["step", "attention"] = "step"
    degree: int = 1
    num_layers: int | None = None
    backend: str | None = None
    kernel_use: bool = False


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of one program. Bytes are of one device, as XLA's memory analysis gives them.

    Attributes:
        backend: of attention.
        seconds, cpu_seconds: to trace, lower and compile it.
        pool_bytes: of the KV pool, which is among the arguments and donated.
        pool_copies: instructions that copy the pool or one of its arrays.
        alias_bytes: of arguments that results are written into.
        vmem_bytes: of a TPU core's vector memory, the most that a Pallas kernel of the program takes.
        error: why there is no program; all numbers are 0 then.
    """

    program: str
    backend: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    pool_bytes: int = 0
    pool_copies: int = 0
    argument_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    vmem_bytes: int = 0
    kernels: tuple[KernelUse, ...] = ()
    error: str | None = None

    @property
    def pool_is_copied(self) -> bool:
        """The donated pool is not updated in place, or is copied on the way."""
        return self.alias_bytes < self.pool_bytes or self.pool_copies > 0

    @property
    def spills(self) -> int:
        """Bytes of registers that Pallas kernels for CUDA keep in memory. XLA's own kernels are not in our hands."""
        return sum(kernel.spill_bytes for kernel in self.kernels if kernel.pallas)


def missing_compiler(target: Target) -> str | None:
    """What to install to compile for this target, as a command; None: it is here."""
    def found(*names: str) -> bool:
        return any(importlib.util.find_spec(name) is not None for name in names)

    if target.platform == "tpu" and not found("libtpu"):
        return how_to_install("tpu")
    if target.platform == "gpu" and not (found("jax_plugins")
                                         and found("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
                                         and find_ptxas() is not None):
        return how_to_install("cuda-compiler")
    return None


class _ProcessEnded(Exception):
    """The compiler took its process with it."""


def run(job: Job) -> Iterator[Compiled]:
    """Compiles the programs in order, and gives each as it is done. What cannot be compiled has an `error`."""
    remaining = list(job.programs)
    with tempfile.TemporaryDirectory(prefix="jaxserve-compile-") as scratch:
        environment, dump_dir = os.environ | _ENVIRONMENT, None
        if job.kernel_use and parse_target(job.target).platform == "gpu":
            environment, dump_dir = dump_environment(environment, scratch), scratch
        while remaining:
            order = asdict(job) | {"programs": remaining}
            try:
                for compiled in _run_once({"job": order, "dump_dir": dump_dir}, environment):
                    remaining.remove(compiled.program)
                    yield compiled
            except _ProcessEnded as error:  # in the middle of a program; the others get another process
                yield Compiled(program=remaining.pop(0), error=str(error))


def _run_once(order: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Compiled]:
    with tempfile.TemporaryFile("w+", errors="replace") as log, subprocess.Popen(
            [sys.executable, "-m", "jaxserve.capacity.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, env=dict(environment), text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            for line in process.stdout:
                fields = json.loads(line)
                yield Compiled(**fields | {"kernels": tuple(KernelUse(**use) for use in fields["kernels"])})
            code = process.wait()
        finally:
            process.kill()
        if code:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or ["no message"]
            # abseil's fatal log lines begin with F and the date; a backtrace follows them.
            fatal = next((line for line in lines if line[0] == "F" and line[1:5].isdigit()), lines[-1])
            raise _ProcessEnded(f"the compiler's process ended with code {code}: {fatal[:500]}")
