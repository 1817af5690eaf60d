"""The TPU kernel beyond the shared tests: its plan, what it never touches, and that its checks would notice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AbstractDevice, AbstractMesh

import kernels_pallas as kernels
from kernels_pallas._compat import tpu_interpreter
from kernels_pallas.mosaic_tpu import attend, copies, plan_batch, unsupported, write
from kernels_pallas.mosaic_tpu.blocks import decode_case, prefill_case
from kernels_pallas.mosaic_tpu.layout import write_rows
from kernels_pallas.mosaic_tpu.plan import SMEM_BYTES, Plan
from tests.kernels.backends import assert_right
from tests.kernels.layers import lower_layers, model
from tests.kernels.mosaic_tpu_harness import MOSAIC_TPU, interpreted, short_steps, to_pool
from tests.kernels.scenes import PADDING, Scene, Seq, Shape, expected, make_scene, places, scenes

TINY = MOSAIC_TPU.tiny


def run_anew(scene: Scene, running: Callable[[], AbstractContextManager] = interpreted) -> np.ndarray:
    """Output of the kernel, traced anew."""
    spec = scene.shape.spec

    def call(q, k, v, pool, batch, layer, window, sinks):
        plan = kernels.plan_batch(batch, spec, "mosaic_tpu")
        return kernels.paged_attention(q, k, v, pool, plan, layer=layer, window=window, sinks=sinks, spec=spec,
                                       backend="mosaic_tpu")

    with running():
        return np.asarray(jax.jit(call)(
            scene.q, scene.k, scene.v, to_pool(scene.pages, spec), scene.batch, jnp.int32(scene.layer),
            None if scene.window is None else jnp.int32(scene.window), scene.sinks)[0])


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Copies happen as they are started, not as late as they may."""
    with short_steps(), tpu_interpreter(dma_execution_mode="eager"):
        yield


# -- the plan

PLANNED = {
    "pieces are pages": Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=3, chunks=5),
    "two pieces a page": Shape(heads=2, kv_heads=1, head_dim=16, page_size=32, pages_per_seq=4, decodes=2, chunks=6,
                               query_block=16, dtype="bfloat16"),
    "pieces larger than query blocks": Shape(heads=2, kv_heads=1, head_dim=16, page_size=64, pages_per_seq=2, decodes=0,
                                             chunks=6, pool_dtype="int8"),
}


@functools.cache
def compiled_plan(shape: Shape):
    return jax.jit(lambda batch: plan_batch(batch, shape.spec))


def planned(scene: Scene) -> Plan:
    """The batch's plan, in numpy."""
    with short_steps():
        return jax.tree.map(np.asarray, compiled_plan(scene.shape)(scene.batch))


@pytest.mark.parametrize("name", PLANNED)
def test_every_new_row_is_written_once_and_no_piece_by_two(name: str):
    shape = PLANNED[name]
    B = write_rows(shape.spec)

    @settings(max_examples=20)
    @given(scene=scenes(shape))
    def check(scene: Scene) -> None:
        writes = planned(scene).writes
        real = range(int(writes.count[0]))
        pieces = [(writes.page[u], writes.offset[u]) for u in real]
        assert len(set(pieces)) == len(pieces)
        assert all(offset % B == 0 for _, offset in pieces)
        written = {(int(writes.page[u]), int(writes.offset[u]) + i): int(writes.source[u]) + i
                   for u in real for i in range(writes.first[u], writes.last[u])}
        wanted = {place: scene.starts[i] + row
                  for i, seq in enumerate(scene.seqs)
                  for row, place in enumerate(places(shape, scene.tables[i], range(seq.start, seq.kv_len)))}
        assert written == wanted

    check()


@pytest.mark.parametrize("name", PLANNED)
def test_every_query_row_is_in_one_tile(name: str):
    shape = PLANNED[name]
    with short_steps():
        height = prefill_case(shape.spec).query_blocks * shape.query_block

    @settings(max_examples=20)
    @given(scene=scenes(shape))
    def check(scene: Scene) -> None:
        plan = planned(scene)
        found = []
        for tiles, first_row, block in ((plan.decode, 0, 1), (plan.prefill, shape.decodes, shape.query_block)):
            for t in range(0 if tiles is None else int(tiles.count[0])):
                assert 0 < tiles.end[t] - tiles.start[t] <= (height if tiles is plan.prefill else 1)
                seq = tiles.table[t] // shape.pages_per_seq
                found += [(seq, tiles.start[t] + i, first_row + tiles.block[t] * block + i)
                          for i in range(tiles.end[t] - tiles.start[t])]
        wanted = [(i, seq.start + row, scene.starts[i] + row)
                  for i, seq in enumerate(scene.seqs) for row in range(seq.count)]
        assert sorted(found) == sorted(wanted)

    check()


def test_block_tables_beyond_scalar_memory_are_refused_with_the_numbers():
    spec = dataclasses.replace(TINY.spec, page_size=16)
    ints = jnp.zeros(64, jnp.int32)
    batch = kernels.AttentionBatch(block_tables=jnp.zeros((64, 8192), jnp.int32), kv_lens=ints, query_starts=ints,
                                   query_lens=ints, num_decode=64, num_tokens=64)
    assert batch.block_tables.nbytes > SMEM_BYTES
    with pytest.raises(ValueError, match=r"64 sequences x 8192 pages .* take \d{7} bytes.*page_size is 16"):
        plan_batch(batch, spec)


def test_pages_must_be_whole_tiles():
    odd = dataclasses.replace(TINY.spec, dtype="bfloat16", page_size=24)
    assert unsupported(odd) == "pages of 24 tokens: a page of bfloat16 is a multiple of 16"
    assert unsupported(dataclasses.replace(odd, page_size=48)) is None


@pytest.mark.parametrize("spec", [model(32, 8, 128), model(16, 8, 256), model(9, 3, 64), model(32, 32, 128),
                                  model(71, 1, 64), model(128, 8, 128, "int8", 64)], ids=str)
def test_the_steps_of_large_models_fill_the_matrix_units_and_not_the_memory(spec: kernels.AttentionSpec):
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    for case in (decode_case(spec), prefill_case(spec)):
        assert case.pages * spec.page_size >= 128
        assert case.slots * case.pages * spec.page_size * token_bytes <= 8 << 20


# -- what is never touched


@pytest.mark.parametrize("window", [None, 9])
def test_pages_beyond_a_context_and_before_a_window_are_not_touched(window: int | None):
    """Their entries in the block tables are no pages at all; a copy from there would raise."""
    shape = dataclasses.replace(TINY, windowed=window is not None)
    scene = make_scene(shape, (Seq(20, 1), PADDING, Seq(17, 11), PADDING), seed=8, window=window)
    wanted = expected(scene)[0]
    tables = scene.tables.copy()
    for i, seq in enumerate(scene.seqs):
        first = 0 if window is None else max(0, seq.start - window + 1) // shape.page_size
        used = range(first, -(-seq.kv_len // shape.page_size))
        tables[i] = [page if at in used else 10**6 for at, page in enumerate(tables[i])]
    out = run_anew(dataclasses.replace(scene, tables=tables))
    assert np.abs(out - wanted).max() <= shape.tolerance


# -- the checks themselves

BUSY = make_scene(TINY, (Seq(40, 1), Seq(3, 1), Seq(9, 12), PADDING), seed=4)


def test_every_copy_is_waited_for(capsys: pytest.CaptureFixture[str]):
    """The interpreter names semaphores with something left that nobody waited for."""
    run_anew(BUSY, eager)
    assert "non-zero count" not in capsys.readouterr().out

    def too_many(group: copies.Group) -> None:
        copies.start(group)
        copies.start(group)

    with mock.patch.object(attend, "start", too_many):
        run_anew(BUSY, eager)
    assert "non-zero count" in capsys.readouterr().out


@pytest.mark.parametrize("phase", [write, attend], ids=["write", "attend"])
def test_a_forgotten_wait_is_noticed(phase):
    with mock.patch.object(phase, "wait", lambda group: None), pytest.raises(Exception, match="(?i)race"):
        run_anew(BUSY, eager)


# -- lowering for TPUs, which needs no compiler of theirs


@pytest.mark.parametrize("dtype, page_size", [("bfloat16", 16), ("int8", 32), ("float8_e4m3fn", 32), ("float32", 8)])
def test_lowers_for_a_tpu_as_one_kernel_over_an_aliased_pool(dtype: str, page_size: int):
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    spec = model(16, 8, 64, dtype, page_size, softcap=30.0)
    with jax.sharding.use_abstract_mesh(mesh):
        text = lower_layers("mosaic_tpu", spec, 8, 4, windowed=True, sinks=True).as_text()
    calls = re.findall(r"stablehlo.custom_call @tpu_custom_call.*", text)
    assert len(calls) == 1
    assert calls[0].count("output_operand_alias<") == len(kernels.pool_spec(spec, "mosaic_tpu"))


# -- many more random batches

MORE_SHAPES = {
    "head dim 64, bfloat16, groups of 8": Shape(
        heads=16, kv_heads=2, head_dim=64, page_size=16, pages_per_seq=5, decodes=4, chunks=4, dtype="bfloat16",
        sinks=True, windowed=True),
    "head dim 256": Shape(heads=4, kv_heads=2, head_dim=256, page_size=8, pages_per_seq=6, decodes=2, chunks=3,
                          softcap=30.0, windowed=True),
    "head dim 80, three kv heads": Shape(heads=3, kv_heads=3, head_dim=80, page_size=16, pages_per_seq=5, decodes=5,
                                         chunks=2),
    "two pieces a page": Shape(heads=4, kv_heads=1, head_dim=16, page_size=32, pages_per_seq=3, decodes=2, chunks=4,
                               query_block=16, dtype="bfloat16"),
    "decode only": Shape(heads=5, kv_heads=1, head_dim=64, page_size=8, pages_per_seq=7, decodes=13, chunks=0),
    "prefill only": Shape(heads=2, kv_heads=2, head_dim=128, page_size=8, pages_per_seq=8, decodes=0, chunks=6),
    "fp8": Shape(heads=4, kv_heads=2, head_dim=64, page_size=32, pages_per_seq=3, decodes=4, chunks=3,
                 dtype="bfloat16", pool_dtype="float8_e4m3fn", windowed=True, sinks=True),
    "int8, head dim 128": Shape(heads=6, kv_heads=3, head_dim=128, page_size=16, pages_per_seq=4, decodes=3, chunks=3,
                                pool_dtype="int8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SHAPES)
def test_equals_the_oracle_in_many_shapes(name: str):
    @settings(max_examples=15)
    @given(scene=scenes(MORE_SHAPES[name]))
    def check(scene: Scene) -> None:
        assert_right(scene, "mosaic_tpu")

    check()
