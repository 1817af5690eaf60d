"""Compiled programs: lowered in one thread, compiled in several, kept on disk, called directly.

A `Compiled` object can only run what it was compiled for, so a request can never make one compile
again. The counter below counts every XLA compilation of the process, ours or not; tests and metrics
use it to show that none happens after warm-up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxserve.runtime.compilation_cache import cache_in_force, cache_settings
from jaxserve.runtime.host_memory import give_back

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_compilations = 0
_in_this_thread = threading.local()  # jax reports what happens in the thread that compiles


def _count(event: str, duration: float, **_: Any) -> None:
    global _compilations
    if event == _COMPILE_EVENT:
        _compilations += 1
        _in_this_thread.asked = True


def _note_hit(event: str, **_: Any) -> None:
    if event == _CACHE_HIT_EVENT:
        _in_this_thread.hit = True


jax.monitoring.register_event_duration_secs_listener(_count)
jax.monitoring.register_event_listener(_note_hit)


def compilations() -> int:
    """XLA compilations in this process so far (those served from the cache on disk included)."""
    return _compilations


class Executables:
    """The compiled programs of one engine, by key. One thread at a time uses it.

    `seconds`: what each took to lower and compile. `from_cache`: those that were found on disk, or that jax still
    had from an earlier engine of this process.

    Args:
        lower: traces and lowers the program of a key.
        cache_dir: see `cache_settings`.

    Raises:
        ConfigError: `cache_dir` cannot be made.
    """

    def __init__(self, lower: Callable[[Any], jax.stages.Lowered], cache_dir: str | None):
        self._lower = lower
        self._cache_settings = cache_settings(cache_dir)
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self.seconds: dict[Hashable, float] = {}
        self.from_cache: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def get(self, key: Hashable) -> jax.stages.Compiled:
        """The program of `key`; compiled now if it is met for the first time."""
        compiled = self._compiled.get(key)
        if compiled is None:
            logger.info("preparing %s", key)  # whether it is in the cache is only known afterwards
            self.compile_all([key])
            compiled = self._compiled[key]
        return compiled

    def compile_all(self, keys: Iterable[Hashable], on_done: Callable[[Hashable], None] | None = None) -> None:
        """Compiles the programs of `keys` that are missing; XLA compiles without holding Python's lock.

        Raises:
            Exception: the first failure to lower or compile one; those that were compiled stay.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._compiled]
        if not missing:
            return

        def compile_one(key: Hashable, lowered: jax.stages.Lowered, lower_seconds: float) -> Hashable:
            started = time.perf_counter()
            _in_this_thread.asked = _in_this_thread.hit = False
            self._compiled[key] = lowered.compile()
            if _in_this_thread.hit or not _in_this_thread.asked:
                self.from_cache.add(key)
            self.seconds[key] = lower_seconds + time.perf_counter() - started
            return key

        # XLA takes about two cores for one program: on two, pairs of them took a tenth longer than one by one.
        with self.cache(), ThreadPoolExecutor(min(len(missing), max((os.cpu_count() or 1) // 2, 1))) as pool:
            futures = []
            try:
                for key in missing:  # tracing is Python and stays in this thread
                    started = time.perf_counter()
                    lowered = self._lower(key)
                    futures.append(pool.submit(compile_one, key, lowered, time.perf_counter() - started))
                for future in as_completed(futures):
                    key = future.result()
                    if on_done is not None:
                        on_done(key)
            except BaseException:  # an interrupt need not wait for those that have not begun
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        give_back()  # most of what XLA took

    def cache(self) -> AbstractContextManager[None]:
        """What is compiled inside is kept on disk, as the programs here are, and found there."""
        return cache_in_force(self._cache_settings)

    def clear(self) -> None:
        self._compiled.clear()
