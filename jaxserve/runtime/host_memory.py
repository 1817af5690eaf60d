"""The C library's allocator, told what an engine does with memory. glibc only; elsewhere nothing happens.

Two habits of an engine do not suit glibc's defaults (numbers: glibc 2.36, jax 0.10, two cores):

- To compile the 12 programs of SmolLM2-135M, XLA takes 1.1 GB in small pieces and frees most of it, but glibc keeps
  what is free for whoever asks next. `give_back` returns 0.7 GB of it to the system, within 0.2 s.
- On CPUs every step takes its temporaries anew and frees them. Blocks beyond 32 MB always come from fresh pages of
  the kernel, which have to be mapped and zeroed: with a vocabulary of 152 thousand and 32 rows 4,600 page faults and
  8 ms a step in a greedy batch, 18,000 and 35 ms with top_p, beside 10 and 140 ms of other work. `keep_large_blocks`
  lets them come from the heap, as small ones do: no faults, once it has grown by a few times their size.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 256 << 20  # bytes; more than a step's temporaries for vocabularies up to a quarter of a million
# A decode step's temporaries are about four times its logits, so those of larger logits are blocks beyond 32 MB.
LOGITS_WORTH_KEEPING = 8 << 20
# Whoever has set the allocator up by these knows better.
_USERS_OWN = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
              "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@functools.cache
def _glibc() -> Any | None:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (others, musl for one, lack it)
        return libc
    except (OSError, TypeError, AttributeError):
        return None


def give_back() -> None:
    """Returns free memory of the whole process to the system. Takes up to 0.2 s after much has been freed."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def keep_large_blocks() -> None:
    """Lets blocks of up to 256 MB be reused instead of being mapped anew, in the whole process.

    Only the heap proper can hold blocks beyond 64 MB, not the arenas that glibc makes for threads, so threads that
    have none yet will share the heap. (They wait for each other in it: compiling in two threads took the same time.)
    Most effective before threads are started. Nothing is changed if the environment sets glibc's allocator up.
    """
    libc = _glibc()
    if libc is None or any(name in os.environ for name in _USERS_OWN):
        return
    for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGE), (_M_TRIM_THRESHOLD, _LARGE)):
        libc.mallopt(option, value)
