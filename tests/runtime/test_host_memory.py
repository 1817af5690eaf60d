"""What the C library keeps, and gives back. Each test is a process of its own: the allocator is the process'."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from jaxserve.runtime import host_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

_PRELUDE = """
import ctypes, resource, threading
from jaxserve.runtime.host_memory import give_back, keep_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) >> 10

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
"""


def run(program: str, **environment: str) -> list[int]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))
                   } | environment
    done = subprocess.run([sys.executable, "-c", _PRELUDE + program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_is_free_is_given_back():
    """Small pieces between which a few stay in use, as a compiler leaves them."""
    full, freed, given_back = run("""
def work():
    pieces = [libc.malloc(2000) for _ in range(100_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 2000)
    print(resident())
    for i, piece in enumerate(pieces):
        if i % 1000:
            libc.free(piece)

in_a_thread(work)
print(resident())
give_back()
print(resident())
""")
    assert freed > full - 50
    assert given_back < full - 150


STEPS = """
def steps():
    for _ in range(12):
        block = libc.malloc(60 << 20)  # a step's temporaries
        ctypes.memset(block, 1, 60 << 20)
        libc.free(block)

keep_large_blocks()
before = faults()
in_a_thread(steps)
print(faults() - before)
"""
ONE_STEP = (60 << 20) // os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def test_large_blocks_are_mapped_once():
    [count] = run(STEPS)
    assert count < 2 * ONE_STEP


def test_an_allocator_that_the_user_has_set_up_is_left_alone():
    [count] = run(STEPS, MALLOC_ARENA_MAX="4")
    assert count > 11 * ONE_STEP


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory, "_glibc", lambda: None)
    host_memory.give_back()
    host_memory.keep_large_blocks()
