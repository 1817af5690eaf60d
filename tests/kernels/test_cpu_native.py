"""What the native CPU kernels have of their own beside the shared tests of attention."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import subprocess
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pallas as kernels
from kernels_pallas import cpu_native
from kernels_pallas.cpu_native import build
from tests.kernels.backends import assert_right, bits, run
from tests.kernels.scenes import PADDING, Seq, Shape, make_scene

LONG = Shape(heads=4, kv_heads=2, head_dim=16, page_size=64, pages_per_seq=25, decodes=3, chunks=3, query_block=32,
             sinks=True)
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.fixture
def unloaded():
    """The kernels are looked for anew in the test, and again after it."""
    build._load.cache_clear()
    yield
    build._load.cache_clear()


# -- numbers as they are stored

FLOAT16 = """
#include "shared.h"
extern "C" void widen(const void* halves, float* vectors, float* singles, int64_t count) {
  auto from = static_cast<const Float16*>(halves);
  for (int64_t i = 0; i < count; i += kLanes) Store(vectors + i, Load(from + i));
  for (int64_t i = 0; i < count; ++i) singles[i] = ToFloat(from[i]);
}
extern "C" void narrow(const float* from, void* halves, int64_t count) {
  for (int64_t i = 0; i < count; ++i) FromFloat(from[i], static_cast<Float16*>(halves) + i);
}
"""


@pytest.mark.parametrize("without", [(), ("-mno-avx512f", "-mno-f16c")], ids=["native", "portable"])
def test_float16_with_and_without_instructions_for_it(without, tmp_path):
    if without and platform.machine() != "x86_64":
        pytest.skip("the instructions are x86's")
    source, library = tmp_path / "float16.cc", tmp_path / "float16.so"
    source.write_text(FLOAT16)
    subprocess.run([*build._compilers()[0][0], *build.FLAGS, *without, "-shared", f"-I{build.HERE}",
                    f"-I{jax.ffi.include_dir()}", str(source), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))
    halves = np.arange(2**16, dtype=np.uint16)
    numbers = halves.view(np.float16).astype(np.float32)
    vectors, singles = np.empty((2, 2**16), np.float32)
    functions.widen(*(ctypes.c_void_p(x.ctypes.data) for x in (halves, vectors, singles)), ctypes.c_int64(2**16))
    np.testing.assert_array_equal(vectors, numbers)
    np.testing.assert_array_equal(singles, numbers)
    # Every half, what lies half way to the next, and a little beside that.
    finite = numbers[np.isfinite(numbers)]
    middles = np.unique(np.append(finite, 65536))
    middles = (middles[1:] + middles[:-1]) / 2
    exact = np.concatenate([finite, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf),
                            np.float32([70000, -np.inf, np.inf, np.nan, 1e-30])]).astype(np.float32)
    rounded = np.empty(exact.size, np.uint16)
    functions.narrow(*(ctypes.c_void_p(x.ctypes.data) for x in (exact, rounded)), ctypes.c_int64(exact.size))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded.view(np.float16), exact.astype(np.float16))


# -- attention: a decode row's context is cut into spans of 512 tokens


@pytest.mark.parametrize("kv_len", [511, 512, 513, 1024, 1600])
def test_contexts_of_several_spans(kv_len: int):
    assert_right(make_scene(LONG, (Seq(kv_len - 1, 1), PADDING, Seq(40, 1), Seq(kv_len - 70, 70), PADDING, PADDING),
                            seed=kv_len), "cpu_native")


@pytest.mark.parametrize("window", [1, 511, 600, 1500])
def test_windows_that_begin_in_a_later_span(window: int):
    shape = Shape(heads=4, kv_heads=2, head_dim=16, page_size=64, pages_per_seq=25, decodes=1, chunks=3,
                  query_block=32, windowed=True)
    assert_right(make_scene(shape, (Seq(1599, 1), Seq(1400, 96), PADDING, PADDING), seed=1, window=window),
                 "cpu_native")


@pytest.mark.parametrize("pool_dtype", kernels.POOL_DTYPES)
def test_a_row_is_bitwise_the_same_in_a_chunk_of_any_length(pool_dtype: str):
    """Tiles of query rows share their products, and a row's result does not depend on which rows share them; neither
    does it on whether a page of 8 bit numbers is widened for many rows at once or as it is read."""
    shape = dataclasses.replace(LONG, pool_dtype=pool_dtype)
    whole = make_scene(shape, (PADDING, PADDING, PADDING, Seq(600, 96), PADDING, PADDING), seed=2)
    out, _ = run(whole, "cpu_native")
    for count in (1, 31, 33):
        part = make_scene(shape, (PADDING, PADDING, PADDING, Seq(600, count), PADDING, PADDING), seed=2)
        for name in ("q", "k", "v"):
            getattr(part, name)[3:3 + count] = getattr(whole, name)[3:3 + count]
        part.pages.values[...] = whole.pages.values
        part.tables[...] = whole.tables
        found, _ = run(part, "cpu_native")
        np.testing.assert_array_equal(bits(found[3:3 + count]), bits(out[3:3 + count]))


# -- the pool


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident set is read from /proc")
def test_an_empty_pool_takes_no_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    spec = dataclasses.replace(LONG.spec, num_pages=20_000)
    size, before = kernels.pool_bytes(spec, "cpu_native"), resident()
    pool = jax.block_until_ready(jax.jit(lambda: kernels.init_pool(spec, "cpu_native"))())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == size > 500 << 20
    assert resident() - before < size / 4


# -- products


def _product(rows: int, inputs: int, outputs: int, dtype: str, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    stack = rng.normal(size=(3, inputs, outputs)).astype(jnp.dtype(dtype))
    return x, stack, jax.jit(cpu_native.linear)


@settings(max_examples=40, deadline=None)
@given(rows=st.sampled_from([1, 2, 3, 5, 6, 7, 32, 130]), inputs=st.sampled_from([1, 16, 127, 128, 300]),
       outputs=st.sampled_from([1, 15, 16, 64, 65, 200]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_product_with_one_of_a_stack(rows: int, inputs: int, outputs: int, dtype: str):
    x, stack, linear = _product(rows, inputs, outputs, dtype)
    for layer in (0, 2):
        found = linear(x, stack, jnp.int32(layer))
        wanted = x.astype(np.float64) @ stack[layer].astype(np.float64)
        assert np.abs(found - wanted).max() <= 1e-6 * inputs


def test_bits_of_bfloat16_multiply_like_the_numbers():
    x, stack, linear = _product(5, 96, 80, "bfloat16")
    np.testing.assert_array_equal(linear(x, stack, jnp.int32(1)), linear(x, stack.view(np.uint16), jnp.int32(1)))


@pytest.mark.parametrize("outputs", [208, 215])  # beyond the last full tile: single vectors, and numbers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_one_row_is_bitwise_that_of_many(outputs, dtype):
    x, stack, linear = _product(200, 300, outputs, dtype)
    many = np.asarray(linear(x, stack, jnp.int32(1)))
    for row in (0, 5, 127, 128, 199):
        np.testing.assert_array_equal(bits(np.asarray(linear(x[row:row + 1], stack, jnp.int32(1)))[0]), bits(many[row]))


def test_nan_stays_in_its_row():
    x, stack, linear = _product(9, 64, 64, "float32")
    healthy = np.asarray(linear(x, stack, jnp.int32(0)))
    x[4] = np.nan
    found = np.asarray(linear(x, stack, jnp.int32(0)))
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(healthy, 4, 0))


# -- where they cannot be had


def test_without_a_compiler_the_portable_path_is_taken_and_says_why(monkeypatch, unloaded):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    choice = kernels.choose_backend(CPU, LONG.spec)
    assert choice.backend == "xla" and "no C++ compiler was found" in choice.reason


@pytest.fixture
def broken(tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'attention.cc:1: error: out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return compiler


def test_compilers_that_fail_are_quoted(monkeypatch, unloaded, broken, tmp_path):
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    assert "out of ideas" in kernels.choose_backend(CPU, LONG.spec).reason
    assert not list((tmp_path / "cache").iterdir())  # nothing half made stays behind


def test_a_compiler_that_fails_gives_way_to_the_next(monkeypatch, unloaded, broken):
    monkeypatch.setenv("CXX", str(broken))
    assert kernels.choose_backend(CPU, LONG.spec).backend == "cpu_native"
    assert re.search(rf"\+\+; {re.escape(str(broken))} failed: .*out of ideas", build.compiled_by())


@pytest.mark.parametrize("command, found", [("ccache g++", ["/bin/ccache", "g++"]), ("g++ -O1", ["/bin/g++", "-O1"]),
                                            ("'/opt/my tools/g++'", ["/bin//opt/my tools/g++"])])
def test_the_environment_s_compiler_may_have_arguments(monkeypatch, command, found):
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/bin/{name}")
    assert build._compilers() == ([found, ["/bin/c++"], ["/bin/g++"], ["/bin/clang++"]], [])


@pytest.mark.parametrize("command, message", [("no-such-compiler -O1", "CXX='no-such-compiler -O1' does not exist"),
                                              ("g++ 'x", "CXX=\"g++ 'x\" is no command")])
def test_a_compiler_that_does_not_exist_gives_way_too(monkeypatch, unloaded, command, message):
    monkeypatch.setenv("CXX", command)
    assert message in build.compiled_by()


def test_arguments_reach_the_compiler(monkeypatch, unloaded, tmp_path):
    compiler = tmp_path / "noting-compiler"
    compiler.write_text(f"#!/bin/sh\necho \"$1\" >> {tmp_path / 'noted'}\nexec c++ \"$@\"\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -DNOTED")
    monkeypatch.setattr(build.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    assert build.compiled_by() == f"{compiler} -DNOTED"
    assert set((tmp_path / "noted").read_text().split()) == {"-DNOTED"}


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, unloaded, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "file"))
    assert "could not be stored or loaded" in kernels.choose_backend(CPU, LONG.spec).reason


def test_the_kernels_are_compiled_once_for_a_machine(monkeypatch, unloaded):
    assert cpu_native.unsupported(LONG.spec) is None
    build._load.cache_clear()

    def compile_again(*args):
        raise AssertionError("compiled a second time")

    monkeypatch.setattr(build, "_compile", compile_again)
    assert cpu_native.unsupported(LONG.spec) is None
