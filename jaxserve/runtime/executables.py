"""Compiled programs: lowered in one thread, compiled in several, kept on disk, called directly.

A `Compiled` object can only run what it was compiled for, so a request can never make one compile
again. The counter below counts every XLA compilation of the process, ours or not; tests and metrics
use it to show that none happens after warm-up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import platformdirs

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compilations = 0


def _count(event: str, duration: float, **_: Any) -> None:
    global _compilations
    if event == _COMPILE_EVENT:
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA compilations in this process so far (those served from the cache on disk included)."""
    return _compilations


@contextlib.contextmanager
def persistent_cache(directory: str | None) -> Iterator[None]:
    """Keeps what is compiled inside in `directory`, small and quick programs too.

    Args:
        directory: None: the user's cache directory, unless jax has one configured already; "": no cache
            of ours.
    """
    if directory == "":
        yield
        return
    if directory is not None or jax.config.jax_compilation_cache_dir is None:
        path = Path(directory) if directory else Path(platformdirs.user_cache_dir("jaxserve")) / "xla"
        path.mkdir(parents=True, exist_ok=True)
        if jax.config.jax_compilation_cache_dir != str(path):
            jax.config.update("jax_compilation_cache_dir", str(path))
    saved = (jax.config.jax_persistent_cache_min_compile_time_secs,
             jax.config.jax_persistent_cache_min_entry_size_bytes)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", saved[0])
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", saved[1])


class Executables:
    """The compiled programs of one engine, by key.

    Args:
        lower: traces and lowers the program of a key.
        cache_dir: see `persistent_cache`.
    """

    def __init__(self, lower: Callable[[Hashable], jax.stages.Lowered], cache_dir: str | None):
        self._lower = lower
        self._cache_dir = cache_dir
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self.seconds: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def get(self, key: Hashable) -> jax.stages.Compiled:
        """The program of `key`; compiled now if it is met for the first time."""
        compiled = self._compiled.get(key)
        if compiled is None:
            logger.info("compiling %s", key)
            self.compile_all([key])
            compiled = self._compiled[key]
        return compiled

    def compile_all(self, keys: Iterable[Hashable], on_done: Callable[[Hashable], None] | None = None) -> None:
        """Compiles the programs of `keys` that are missing; XLA compiles without holding Python's lock."""
        missing = [key for key in keys if key not in self._compiled]
        if not missing:
            return

        def compile_one(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
            start = time.perf_counter()
            compiled = lowered.compile()
            return compiled, time.perf_counter() - start

        with persistent_cache(self._cache_dir), ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            started = {}
            futures = {}
            for key in missing:  # tracing is Python and stays in this thread
                started[key] = time.perf_counter()
                lowered = self._lower(key)
                started[key] = time.perf_counter() - started[key]
                futures[pool.submit(compile_one, lowered)] = key
            for future in as_completed(futures):
                key = futures[future]
                self._compiled[key], seconds = future.result()
                self.seconds[key] = started[key] + seconds
                if on_done is not None:
                    on_done(key)

    def clear(self) -> None:
        self._compiled.clear()
