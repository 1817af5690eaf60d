"""XLA's compilation cache on disk, lent to us while we compile.

jax has one such cache for the whole process, made at its first use from settings that are the process's too. A
user's own jax code shares them, so ours are in force only while a program of ours is compiled, and engines with
different settings take turns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_DIRECTORY = "jax_compilation_cache_dir"
# Small and quick programs are kept too: a start needs a dozen of them.
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

_turn = threading.Condition()
_in_force: Mapping[str, Any] = {}
_users_own: dict[str, Any] = {}  # what the settings in force have replaced
_inside = 0  # threads that compile with them


def cache_settings(directory: str | None) -> dict[str, Any]:
    """jax's settings, by name, that keep compiled programs in `directory`.

    Args:
        directory: None: the one that jax is configured with already, else the user's cache directory; "": jax's
            settings as they are, so that nothing is kept unless the user has configured jax so.

    Raises:
        ConfigError: there is no such directory and it cannot be made.
    """
    if directory == "":
        return {}
    with _turn:
        configured = _users_own.get(_DIRECTORY, getattr(jax.config, _DIRECTORY))
    if directory is None and configured is not None:
        return dict(_KEEP_ALL)
    path = Path(platformdirs.user_cache_dir("jaxserve")) / "xla" if directory is None else Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if directory is not None:
            raise ConfigError(f"compilation_cache_dir={directory!r} cannot be made ({error}); give a directory that "
                              f"can be written to, or \"\" for no cache") from error
        logger.warning("compiled programs are not kept: %s cannot be made (%s)", path, error)
        return {}
    return {_DIRECTORY: str(path), **_KEEP_ALL}


def cache_directory(directory: str | None) -> str | None:
    """Where `cache_settings(directory)` keeps programs; None: nowhere. Errors: the same."""
    settings = cache_settings(directory)
    with _turn:
        return settings.get(_DIRECTORY, _users_own.get(_DIRECTORY, getattr(jax.config, _DIRECTORY)))


@contextlib.contextmanager
def cache_in_force(settings: Mapping[str, Any]) -> Iterator[None]:
    """Compiles inside with the cache of `cache_settings`; afterwards jax's settings are what they were.

    Threads may be inside at once if their settings are the same; others wait.
    """
    global _in_force, _inside
    with _turn:
        _turn.wait_for(lambda: _inside == 0 or _in_force == settings)
        if _inside == 0:
            _in_force = settings
            _users_own.update({name: getattr(jax.config, name) for name in settings})
            _configure(settings)
        _inside += 1
    try:
        yield
    finally:
        with _turn:
            _inside -= 1
            if _inside == 0:
                _configure(_users_own)
                _users_own.clear()
                _turn.notify_all()


def _configure(settings: Mapping[str, Any]) -> None:
    moves = _DIRECTORY in settings and settings[_DIRECTORY] != getattr(jax.config, _DIRECTORY)
    for name, value in settings.items():
        jax.config.update(name, value)
    if moves:
        compilation_cache.reset_cache()  # jax looks at the directory only when it makes its cache
