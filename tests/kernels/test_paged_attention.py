"""One body of tests for every attention backend: random batches, then the corners by name."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pallas as kernels
from tests.kernels.scenes import (
    BACKENDS,
    PADDING,
    Scene,
    Seq,
    Shape,
    assert_right,
    bits,
    expected,
    make_scene,
    rearranged,
    run,
    scenes,
)

# Few shapes, each compiled once: every group size from 1 to 5, head dims from 16 to 128 (powers of two or not),
# every page size in use, more decode rows than a tile holds, chunks of one and of several query blocks.
SHAPES = {
    "mixed": Shape(heads=2, kv_heads=2, head_dim=16, page_size=8, pages_per_seq=17, decodes=5, chunks=4),
    "mixed, window": Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, pages_per_seq=9, decodes=3, chunks=6,
                           windowed=True),
    "mixed, bfloat16": Shape(heads=6, kv_heads=2, head_dim=96, page_size=16, pages_per_seq=9, decodes=2, chunks=3,
                             query_block=32, dtype="bfloat16", softcap=5.0, windowed=True),
    "decode only": Shape(heads=4, kv_heads=1, head_dim=80, page_size=64, pages_per_seq=4, decodes=19, chunks=0),
    "prefill only": Shape(heads=5, kv_heads=1, head_dim=128, page_size=64, pages_per_seq=3, decodes=0, chunks=5,
                          query_block=32, dtype="float16", softcap=30.0),
}


each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_backend
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=15)
@given(data=st.data())
def test_equals_the_oracle(name: str, backend: kernels.Backend, data: st.DataObject):
    """Wherever no context reaches there is NaN, as in padding rows, and the rows that this call writes are NaN
    before it: nothing stray is read, and nothing is read before it is written."""
    assert_right(data.draw(scenes(SHAPES[name])), backend)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=10)
@given(data=st.data())
def test_a_result_is_bitwise_the_same_in_any_company(name: str, data: st.DataObject):
    """In any order, with any neighbours or none, on any pages."""
    scene = data.draw(scenes(SHAPES[name], sharing=False))
    real = [i for i, seq in enumerate(scene.seqs) if seq.count]
    kept = data.draw(st.permutations(real)) if real else []
    kept = kept[:data.draw(st.integers(0, len(kept)))]
    decodes = [i for i in kept if i < scene.shape.decodes]
    chunks = [i for i in kept if i >= scene.shape.decodes]
    other, moved = rearranged(scene, decodes, chunks, seed=data.draw(st.integers(0, 2**32 - 1)))
    first, second = run(scene, "xla")[0], run(other, "xla")[0]
    for old, new in moved.items():
        np.testing.assert_array_equal(bits(first[scene.rows(old)]), bits(second[other.rows(new)]))


# -- corners

TINY = Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=2, chunks=2)
TINY_WINDOW = Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=2, chunks=2,
                    windowed=True)


def tiny(*seqs: Seq, window: int | None = None, seed: int = 0) -> Scene:
    """Two decode rows, then two chunks."""
    return make_scene(TINY if window is None else TINY_WINDOW, seqs, seed=seed, window=window)


@each_backend
def test_a_batch_of_padding_leaves_every_page_alone(backend: kernels.Backend):
    scene = tiny(PADDING, PADDING, PADDING, PADDING)
    assert_right(scene, backend)
    assert not run(scene, backend)[0].any()


@each_backend
def test_the_first_token_sees_itself_alone(backend: kernels.Backend):
    scene = tiny(Seq(0, 1), PADDING, Seq(0, 1), PADDING)
    out, _ = run(scene, backend)
    for i in (0, 2):
        row = scene.rows(i).start
        np.testing.assert_allclose(out[row], np.repeat(scene.v[row], 2, axis=0), rtol=1e-6)


@each_backend
@pytest.mark.parametrize("kv_len", [7, 8, 9, 16, 63, 64, 65, 72])
def test_contexts_at_page_and_step_borders(kv_len: int, backend: kernels.Backend):
    chunk = Seq(max(kv_len - 8, 0), min(8, kv_len))
    assert_right(tiny(Seq(kv_len - 1, 1), Seq(0, 1), Seq(kv_len - 1, 1), chunk), backend)


@each_backend
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 64, 1 << 30])
def test_windows_smaller_than_a_page_and_larger_than_any_context(window: int, backend: kernels.Backend):
    assert_right(tiny(Seq(71, 1), Seq(8, 1), Seq(60, 8), Seq(0, 3), window=window), backend)


@each_backend
def test_a_window_of_one_copies_the_value(backend: kernels.Backend):
    scene = tiny(Seq(70, 1), Seq(3, 1), Seq(9, 8), PADDING, window=1)
    out, _ = run(scene, backend)
    for i in range(3):
        np.testing.assert_allclose(out[scene.rows(i)], np.repeat(scene.v[scene.rows(i)], 2, axis=1), rtol=1e-6)


@each_backend
def test_a_very_ragged_batch(backend: kernels.Backend):
    assert_right(tiny(Seq(0, 1), Seq(71, 1), Seq(64, 8), Seq(0, 1)), backend)


@each_backend
def test_a_chunk_of_several_query_blocks_that_is_not_whole(backend: kernels.Backend):
    assert_right(tiny(PADDING, Seq(5, 1), Seq(17, 11), PADDING), backend)


@each_backend
def test_pages_filled_in_this_call_are_read_in_this_call(backend: kernels.Backend):
    """The chunk fills two pages; a decode row behind it, and another chunk, go on from them."""
    shape = Shape(heads=2, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=9, decodes=0, chunks=4)
    writer = Seq(0, 16)
    assert_right(make_scene(shape, (writer, Seq(16, 5, donor=0, shared=2), Seq(10, 3, donor=0, shared=1), PADDING),
                            seed=1), backend)


@each_backend
def test_many_sequences_read_the_same_pages(backend: kernels.Backend):
    assert_right(tiny(Seq(64, 1), Seq(64, 1, donor=0, shared=8), Seq(33, 4, donor=0, shared=4),
                      Seq(70, 2, donor=1, shared=8)), backend)


@each_backend
def test_a_broken_neighbour_is_not_contagious(backend: kernels.Backend):
    """A sequence whose own values are not finite gets such a result; the others get what they get without it."""
    scene = tiny(Seq(40, 1), Seq(40, 1), Seq(12, 8), Seq(3, 8))
    healthy = run(scene, backend)[0]
    for broken in (1, 2):
        scene.q[scene.rows(broken)] = np.nan
        scene.k[scene.rows(broken)] = np.inf
        scene.v[scene.rows(broken)] = np.nan
    out, _ = run(scene, backend)
    for fine in (0, 3):
        np.testing.assert_array_equal(bits(out[scene.rows(fine)]), bits(healthy[scene.rows(fine)]))
    assert np.isnan(out[scene.rows(1)]).all()


@each_backend
def test_scores_beyond_float16_give_no_nan(backend: kernels.Backend):
    """Scores of 1e5 and more, which float16 cannot hold: the softmax is float32."""
    shape = Shape(heads=1, kv_heads=1, head_dim=16, page_size=8, pages_per_seq=2, decodes=1, chunks=1, dtype="float16")
    scene = make_scene(shape, (Seq(9, 1), Seq(0, 8)), seed=3)
    scene.q[...] *= np.float16(300)
    scene.k[...] *= np.float16(300)
    out, _ = run(scene, backend)
    wanted, _ = expected(scene)
    assert np.abs(out.astype(np.float64) - wanted).max() <= shape.tolerance * 3


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'cuda'.*reference, xla"):
        kernels.pool_spec(TINY.spec, "cuda")  # type: ignore[arg-type]


# -- the rest of the contract


def test_token_rows_name_sequence_and_position():
    batch = tiny(Seq(4, 1), PADDING, Seq(6, 3), PADDING).batch
    seq, position, valid = (np.asarray(x) for x in kernels.token_rows(batch))
    real = [0, 2, 3, 4]
    np.testing.assert_array_equal(np.flatnonzero(valid), real)
    np.testing.assert_array_equal(seq[real], [0, 2, 2, 2])
    np.testing.assert_array_equal(position[real], [4, 6, 7, 8])
    assert not seq[~valid].any() and not position[~valid].any()


@each_backend
def test_a_pool_has_the_bytes_that_its_spec_says(backend: kernels.Backend):
    for shape in SHAPES.values():
        leaves = jax.tree.leaves(kernels.pool_spec(shape.spec, backend))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == kernels.pool_bytes(shape.spec, backend)
        for leaf in leaves:
            assert leaf.shape[1] == shape.kv_heads  # the axis that tensor parallelism shards


@each_backend
def test_a_new_pool_is_zero(backend: kernels.Backend):
    pool = kernels.init_pool(TINY.spec, backend)
    assert all(not np.asarray(leaf).any() for leaf in pool.values())


def test_every_platform_has_a_backend():
    for platform in ("cpu", "gpu", "tpu"):
        device = types.SimpleNamespace(platform=platform, device_kind="one", compute_capability="7.5")
        choice = kernels.choose_backend(device, TINY.spec)
        assert choice.backend == "xla" and "one" in choice.reason


@each_backend
def test_the_pool_may_hold_another_dtype_than_the_queries(backend: kernels.Backend):
    """float32 activations over a bfloat16 pool: rows are rounded as they are written, the output is not."""
    shape = dataclasses.replace(TINY, dtype="bfloat16")
    scene = make_scene(shape, (Seq(40, 1), Seq(3, 1), Seq(10, 8), Seq(0, 5)), seed=5)
    wanted, _ = expected(scene)
    wide = dataclasses.replace(scene, **{name: getattr(scene, name).astype(np.float32) for name in ("q", "k", "v")})
    out, _ = run(wide, backend)
    assert out.dtype == np.float32
    assert np.abs(out - wanted).max() <= 2e-5
