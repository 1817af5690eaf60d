"""Compiles and loads the native kernels: once for each machine, compiler and jaxlib, into the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import platformdirs

HERE = Path(__file__).parent
SOURCES = (HERE / "attention.cc", HERE / "linear.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
KERNELS = ("paged_attention", "uninitialized", "linear")
COMPILE_SECONDS = 300
_NO_COMPILER = "no C++ compiler was found (c++, g++ or clang++)"


class Unavailable(Exception):
    """Why the native kernels cannot be used here, in a few words."""


def _processor() -> str:
    """What -march=native depends on; the instruction sets on Linux, the name elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _compilers() -> tuple[list[list[str]], list[str]]:
    """Commands that may compile C++ and are here, the first to be tried first, and what is wrong with the user's own:
    CXX, which may have arguments ("ccache g++")."""
    commands, wrong = [[name] for name in COMPILERS], []
    if cxx := os.environ.get("CXX"):
        try:
            own = shlex.split(cxx)
        except ValueError as error:
            wrong.append(f"CXX={cxx!r} is no command: {error}")
        else:
            commands = [own, *commands]
            if own and shutil.which(own[0]) is None:
                wrong.append(f"CXX={cxx!r} does not exist")
    return [[path, *rest] for name, *rest in filter(None, commands) if (path := shutil.which(name))], wrong


def _compile(compiler: list[str], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # In a directory of its own, and moved when whole: another process may be doing the same.
    with tempfile.TemporaryDirectory(dir=to.parent) as directory, contextlib.ExitStack() as running:
        def start(*arguments: str) -> subprocess.Popen[str]:
            process = running.enter_context(subprocess.Popen(
                [*compiler, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            running.callback(process.kill)
            return process

        objects = [os.path.join(directory, f"{source.stem}.o") for source in SOURCES]
        for process in [start(*FLAGS, "-c", f"-I{jax.ffi.include_dir()}", str(source), "-o", result)
                        for source, result in zip(SOURCES, objects)]:
            _finish(compiler, process)
        library = os.path.join(directory, "kernels.so")
        _finish(compiler, start("-shared", *objects, "-o", library))
        os.replace(library, to)


def _finish(compiler: list[str], process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{shlex.join(compiler)} took more than {COMPILE_SECONDS} seconds") from None
    if process.returncode:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise Unavailable(f"{shlex.join(compiler)} failed: {first}")


@dataclass(frozen=True)
class _Loaded:
    """`targets`: kernel -> the name under which XLA knows it. `compiler`: whose work they are, and which failed."""

    targets: dict[str, str]
    compiler: str


def _library(compiler: list[str]) -> tuple[str, ctypes.CDLL]:
    """The compiled kernels, and the key of what they are made from."""
    parts = [*(path.read_bytes() for path in (*SOURCES, HERE / "shared.h")), shlex.join([*compiler, *FLAGS]).encode(),
             version("jaxlib").encode(), _processor().encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    path = Path(platformdirs.user_cache_dir("kernels_pallas")) / f"cpu-{key}.so"
    if not path.exists():
        _compile(compiler, path)
    return key, ctypes.CDLL(str(path))


@functools.cache
def _load() -> _Loaded | Unavailable:
    compilers, failures = _compilers()
    try:
        for compiler in compilers:
            try:
                key, library = _library(compiler)
                break
            except Unavailable as error:
                failures.append(str(error))
        else:
            return Unavailable("; ".join(failures if compilers else [_NO_COMPILER, *failures]))
    except OSError as error:
        return Unavailable(f"the compiled kernels could not be stored or loaded: {error}")
    # The names stand in compiled programs, which are cached: a changed kernel must not meet an old program.
    targets = {kernel: f"kernels_pallas.{kernel}.{key}" for kernel in KERNELS}
    for kernel, target in targets.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, kernel)), platform="cpu")
    return _Loaded(targets, "; ".join((shlex.join(compiler), *failures)))


def targets() -> dict[str, str]:
    """Kernel -> the name under which XLA knows it. Compiles them if this machine has not done so yet (5 s).

    Raises:
        Unavailable: there is no compiler, every one fails, or the result cannot be stored or loaded.
    """
    loaded = _load()
    if isinstance(loaded, Unavailable):
        raise Unavailable(*loaded.args)  # not the kept one, to which each raise adds frames
    return loaded.targets


def compiled_by() -> str:
    """The compiler whose kernels are used, and those that were tried before and failed. Errors: as `targets`."""
    targets()
    loaded = _load()
    assert isinstance(loaded, _Loaded)
    return loaded.compiler
