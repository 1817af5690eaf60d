"""Registers, spills and shared memory of the CUDA kernels in a compiled program, from `ptxas -v` on their PTX."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

_MOSAIC = "mosaic"  # the directory of what Mosaic GPU dumps


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """Of one kernel; `shared_bytes` is what it declares, of a Pallas kernel with what its launch adds.

    `pallas`: written in Pallas Mosaic GPU; else it is XLA's own.
    """

    name: str
    pallas: bool
    registers: int
    spill_bytes: int
    shared_bytes: int


def find_ptxas() -> str | None:
    """The ptxas of NVIDIA's Python packages, or else one on the PATH. XLA looks in the same places."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas"):
            if (ptxas := Path(root, path)).is_file():
                return str(ptxas)
    return shutil.which("ptxas")


def dump_environment(environment: Mapping[str, str], dump_dir: str) -> dict[str, str]:
    """The environment in which XLA and Mosaic GPU write the PTX of what they compile below `dump_dir`."""
    mosaic = Path(dump_dir, _MOSAIC)
    mosaic.mkdir()
    flags = f"--xla_dump_to={dump_dir}/xla --xla_dump_hlo_as_text"
    if not version("jax").startswith("0.10."):
        flags += " --xla_dump_emitter_re=ptx"  # there PTX is written only when asked for
    return dict(environment) | {
        "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {flags}".strip(), "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_MLIR_PASSES": "1", "MOSAIC_GPU_DUMP_TO": str(mosaic)}


def take_dumped(dump_dir: str, arch: str) -> tuple[KernelUse, ...]:
    """The kernels whose PTX has been written since the last call.

    Raises:
        RuntimeError: ptxas rejects what XLA wrote, most often because it is older than the CUDA that XLA found.
    """
    kernels = []
    for path in sorted(Path(dump_dir).rglob("*")):
        if path.suffix == ".ptx" and ".entry" in path.read_text(errors="replace"):
            pallas = Path(dump_dir, _MOSAIC) in path.parents
            dynamic = launch_shared_bytes(path.with_suffix(".mlir-passes.log")) if pallas else 0
            kernels += [replace(kernel, shared_bytes=kernel.shared_bytes + dynamic)
                        for kernel in _assemble(path, arch, pallas)]
    for path in Path(dump_dir).rglob("*"):
        if path.is_file():
            path.unlink()
    return tuple(kernels)


def launch_shared_bytes(passes: Path) -> int:
    """The shared memory that a Mosaic GPU kernel is launched with, from the log of its compiler passes."""
    text = passes.read_text(errors="replace") if passes.is_file() else ""
    size = re.search(r"dynamic_shared_memory_size (%\w+)", text)
    value = re.search(rf"{size[1]} = arith\.constant (\d+)", text) if size else None
    return int(value[1]) if value else 0


def _assemble(path: Path, arch: str, pallas: bool) -> list[KernelUse]:
    ptxas = find_ptxas()
    assert ptxas is not None
    done = subprocess.run([ptxas, "-v", f"--gpu-name={arch}", str(path), "-o", os.devnull], capture_output=True,
                          text=True, errors="replace", check=False)
    report = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"ptxas: {report.strip()[:300]}")
    return parse_report(report, pallas)


def parse_report(report: str, pallas: bool) -> list[KernelUse]:
    """The kernels in what `ptxas -v` prints."""
    kernels = []
    for part in re.split(r"Compiling entry function '", report)[1:]:
        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        kernels.append(KernelUse(
            name=part.partition("'")[0], pallas=pallas, registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            shared_bytes=number(r"(\d+) bytes smem")))
    return kernels
