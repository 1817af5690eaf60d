"""jax has one compilation cache, and its settings are the user's: ours are in force only while we compile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import platformdirs
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.errors import ConfigError
from jaxserve.runtime.compilation_cache import cache_in_force, cache_settings
from jaxserve.runtime.executables import Executables

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
         "jax_persistent_cache_min_entry_size_bytes")


def jax_settings() -> dict[str, object]:
    return {name: getattr(jax.config, name) for name in NAMES}


@pytest.fixture(autouse=True)
def settings_are_put_back():
    before = jax_settings()
    yield
    assert jax_settings() == before


@pytest.fixture
def users_directory(tmp_path):
    """jax as a user has configured it."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "users"))
    compilation_cache.reset_cache()
    yield tmp_path / "users"
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def lower(key: int) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * key).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


def compile_one(cache_dir: str | Path | None, key: int) -> None:
    Executables(lower, cache_dir if cache_dir is None else str(cache_dir)).get(key)


def entries(directory: Path) -> int:
    return sum(path.name.endswith("-cache") for path in directory.iterdir()) if directory.exists() else 0


def test_each_engine_has_its_own_directory(tmp_path):
    """jax itself would go on with the first one."""
    for i, name in enumerate(["a", "b", "a"]):
        compile_one(tmp_path / name, 100 + i)
    assert (entries(tmp_path / "a"), entries(tmp_path / "b")) == (2, 1)


def test_no_directory_keeps_nothing(tmp_path):
    compile_one(tmp_path / "a", 200)
    compile_one("", 201)
    assert entries(tmp_path / "a") == 1


def test_the_user_s_own_programs_do_not_get_into_ours(tmp_path):
    compile_one(tmp_path / "a", 300)
    jax.jit(lambda x: x * 301)(jnp.ones(3))
    assert entries(tmp_path / "a") == 1


def test_the_default_is_the_user_s_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    compile_one(None, 400)
    assert entries(tmp_path / "jaxserve" / "xla") == 1


def test_the_default_is_jax_s_own_directory_if_it_has_one(users_directory, tmp_path):
    compile_one(None, 500)
    assert entries(users_directory) == 1
    compile_one(tmp_path / "a", 501)  # one that is named goes before
    assert (entries(users_directory), entries(tmp_path / "a")) == (1, 1)
    compile_one(None, 502)
    assert entries(users_directory) == 2


def test_the_user_s_directory_is_found_while_another_engine_compiles(users_directory, tmp_path):
    with cache_in_force(cache_settings(str(tmp_path / "a"))):
        assert "jax_compilation_cache_dir" not in cache_settings(None)


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compilation_cache_dir='.*file/x' cannot be made"):
        Executables(lower, str(tmp_path / "file" / "x"))
    # Nobody asked for the default one, so the engine starts without.
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / "file" / app))
    with caplog.at_level(logging.WARNING):
        compile_one(None, 600)
    assert "compiled programs are not kept" in caplog.text


def test_settings_are_put_back_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError), cache_in_force(cache_settings(str(tmp_path / "a"))):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a")
        raise RuntimeError


def test_equal_settings_share_and_others_wait(tmp_path):
    ours, same, other = (cache_settings(str(tmp_path / name)) for name in ("a", "a", "b"))
    shared, waited = threading.Event(), threading.Event()
    seen: list[str | None] = []

    def compile_with(settings, done: threading.Event) -> None:
        with cache_in_force(settings):
            seen.append(jax.config.jax_compilation_cache_dir)
        done.set()

    with cache_in_force(ours):
        threads = [threading.Thread(target=compile_with, args=args) for args in ((other, waited), (same, shared))]
        for thread in threads:
            thread.start()
        assert shared.wait(60)
        assert not waited.is_set()
    for thread in threads:
        thread.join()
    assert seen == [str(tmp_path / "a"), str(tmp_path / "b")]


PROCESS = """
import sys
import jax
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.programs import ADMIT
from tests.runtime.rig import make_plan
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
Executables(make_plan().lower, sys.argv[1]).compile_all([ADMIT, Bucket(1, 0)])
print(len(hits))
"""


def test_a_second_process_takes_all_from_the_cache(tmp_path):
    """The real programs: nothing in them may differ from one process to the next."""
    for hits in (0, 2):
        result = subprocess.run([sys.executable, "-W", "error", "-c", PROCESS, str(tmp_path)], capture_output=True,
                                text=True, cwd=Path(__file__).parents[2])
        assert result.returncode == 0, result.stderr
        assert int(result.stdout) == hits
        assert entries(tmp_path) == 2
