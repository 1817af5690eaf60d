"""The settings of jax that our programs are traced and run under, whatever the user has set for code of his own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Inside, in this thread, jax behaves as the engine is written for. Also a decorator.

    Precision, promotion of ranks and types: a program is the same, and gives the same ids, under all of them. Jit and
    transfers: compiled programs are called with numpy arrays. NaNs and infinities: the engine looks for them itself,
    so that one bad row ends one request. `jax_default_matmul_precision` stays the user's, who may want more of a TPU.
    """
    with (jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"),
          jax.disable_jit(False), jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False)):
        yield
