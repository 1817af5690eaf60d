"""One body of tests for every attention backend: random batches, then the corners by name."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pallas as kernels
from tests.kernels.backends import HARNESSES, assert_right, bits, run, skip_unsupported
from tests.kernels.scenes import PADDING, Scene, Seq, Shape, expected, make_scene, quantized, rearranged, scenes

each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(backend, marks=side.marks) for backend, side in HARNESSES.items()])
each_shape = pytest.mark.parametrize(
    "backend, name", [pytest.param(backend, name, marks=side.marks) for backend, side in HARNESSES.items()
                      for name in side.shapes])


def examples(backend: kernels.Backend, share: float = 1.0):
    return settings(max_examples=max(2, round(share * HARNESSES[backend].examples)))


@each_shape
def test_equals_the_oracle(backend: kernels.Backend, name: str):
    """Wherever no context reaches there is NaN, as in padding rows, and the rows that this call writes are NaN
    before it: nothing stray is read, and nothing is read before it is written."""
    @examples(backend)
    @given(scene=scenes(HARNESSES[backend].shapes[name]))
    def check(scene: Scene) -> None:
        assert_right(scene, backend)

    check()


@each_shape
def test_a_result_is_bitwise_the_same_in_any_company(backend: kernels.Backend, name: str):
    """In any order, with any neighbours or none, on any pages."""
    if backend == "reference":
        pytest.skip("it computes all rows in one product")
    @examples(backend, share=0.7)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        scene = data.draw(scenes(HARNESSES[backend].shapes[name], sharing=False))
        real = [i for i, seq in enumerate(scene.seqs) if seq.count]
        kept = data.draw(st.permutations(real)) if real else []
        kept = kept[:data.draw(st.integers(0, len(kept)))]
        decodes = [i for i in kept if i < scene.shape.decodes]
        chunks = [i for i in kept if i >= scene.shape.decodes]
        other, moved = rearranged(scene, decodes, chunks, seed=data.draw(st.integers(0, 2**32 - 1)))
        first, second = run(scene, backend)[0], run(other, backend)[0]
        for old, new in moved.items():
            np.testing.assert_array_equal(bits(first[scene.rows(old)]), bits(second[other.rows(new)]))

    check()


# -- corners; N is the page size, R the query block, and a context has room for `max_len` tokens


def tiny(backend: kernels.Backend, **changes) -> Shape:
    """Two decode rows, then two chunks, unless the changes say otherwise."""
    shape = dataclasses.replace(HARNESSES[backend].tiny, **changes)
    skip_unsupported(shape, backend)
    return shape


def border(shape: Shape, pages: int, more: int) -> int:
    """So many tokens more than whole pages; a negative number of pages counts from the longest context."""
    return (pages if pages > 0 else shape.pages_per_seq + pages) * shape.page_size + more


@each_backend
def test_a_batch_of_padding_leaves_every_page_alone(backend: kernels.Backend):
    scene = make_scene(tiny(backend), (PADDING,) * 4, seed=0)
    assert_right(scene, backend)
    assert not run(scene, backend)[0].any()


@each_backend
def test_the_first_token_sees_itself_alone(backend: kernels.Backend):
    shape = tiny(backend)
    scene = make_scene(shape, (Seq(0, 1), PADDING, Seq(0, 1), PADDING), seed=0)
    out, _ = run(scene, backend)
    for i in (0, 2):
        row = scene.rows(i).start
        np.testing.assert_allclose(out[row], np.repeat(scene.v[row], shape.heads // shape.kv_heads, axis=0), rtol=1e-6)


@each_backend
@pytest.mark.parametrize("pages, more", [(1, -1), (1, 0), (1, 1), (2, 0), (-1, -1), (-1, 0), (-1, 1), (0, 0)])
def test_contexts_at_page_and_step_borders(pages: int, more: int, backend: kernels.Backend):
    shape = tiny(backend)
    kv_len, block = border(shape, pages, more), shape.query_block
    chunk = Seq(max(kv_len - block, 0), min(block, kv_len))
    assert_right(make_scene(shape, (Seq(kv_len - 1, 1), Seq(0, 1), Seq(kv_len - 1, 1), chunk), seed=0), backend)


@each_backend
@pytest.mark.parametrize("pages, more", [(1, 1 - 10**6), (1, -1), (1, 0), (1, 1), (-1, 0), (1 << 20, 0)])
def test_windows_smaller_than_a_page_and_larger_than_any_context(pages: int, more: int, backend: kernels.Backend):
    shape = tiny(backend, windowed=True)
    most, block = shape.max_len, shape.query_block
    seqs = Seq(most - 1, 1), Seq(shape.page_size, 1), Seq(most - block - 4, block), Seq(0, 3)
    assert_right(make_scene(shape, seqs, seed=0, window=max(1, border(shape, pages, more))), backend)


@each_backend
def test_a_window_of_one_copies_the_value(backend: kernels.Backend):
    shape = tiny(backend, windowed=True)
    seqs = Seq(shape.max_len - 2, 1), Seq(3, 1), Seq(shape.page_size + 1, shape.query_block), PADDING
    scene = make_scene(shape, seqs, seed=0, window=1)
    out, _ = run(scene, backend)
    for i in range(3):
        values = np.repeat(scene.v[scene.rows(i)], shape.heads // shape.kv_heads, axis=1)
        np.testing.assert_allclose(out[scene.rows(i)], values, rtol=1e-6)


@each_backend
def test_a_very_ragged_batch(backend: kernels.Backend):
    shape = tiny(backend)
    most, block = shape.max_len, shape.query_block
    assert_right(make_scene(shape, (Seq(0, 1), Seq(most - 1, 1), Seq(most - block, block), Seq(0, 1)), seed=0), backend)


@each_backend
def test_a_chunk_of_several_query_blocks_that_is_not_whole(backend: kernels.Backend):
    shape = tiny(backend)
    chunk = Seq(2 * shape.page_size + 1, shape.query_block + 3)
    assert_right(make_scene(shape, (PADDING, Seq(5, 1), chunk, PADDING), seed=0), backend)


@each_backend
def test_pages_filled_in_this_call_are_read_in_this_call(backend: kernels.Backend):
    """A chunk fills two pages, and two other chunks go on from them."""
    N, R = HARNESSES[backend].tiny.page_size, HARNESSES[backend].tiny.query_block
    shape = tiny(backend, decodes=0, chunks=-(-2 * N // R) + 2)
    seqs = Seq(0, 2 * N), Seq(2 * N, 5, donor=0, shared=2), Seq(N + 2, 3, donor=0, shared=1)
    assert_right(make_scene(shape, (*seqs, *[PADDING] * (shape.chunks - 3)), seed=1), backend)


@each_backend
def test_many_sequences_read_the_same_pages(backend: kernels.Backend):
    shape = tiny(backend)
    most, N, pages = shape.max_len, shape.page_size, shape.pages_per_seq - 1
    seqs = (Seq(pages * N, 1), Seq(pages * N, 1, donor=0, shared=pages),
            Seq(pages // 2 * N + 1, 4, donor=0, shared=pages // 2), Seq(most - 2, 2, donor=1, shared=pages))
    assert_right(make_scene(shape, seqs, seed=0), backend)


@each_backend
@pytest.mark.parametrize("pool_dtype", [None, "int8", "float8_e4m3fn"])
def test_a_broken_neighbour_is_not_contagious(pool_dtype: str | None, backend: kernels.Backend):
    """A sequence whose own values are not finite gets such a result; the others get what they get without it."""
    shape = tiny(backend, pool_dtype=pool_dtype)
    middle, block = shape.max_len // 2 + 4, shape.query_block
    scene = make_scene(shape, (Seq(middle, 1), Seq(middle, 1), Seq(shape.page_size + 4, block), Seq(3, block)), seed=0)
    healthy = run(scene, backend)[0]
    for broken in (1, 2):
        scene.k[scene.rows(broken)] = np.inf
        scene.v[scene.rows(broken)] = np.nan
    out, _ = run(scene, backend)
    for fine in (0, 3):
        np.testing.assert_array_equal(bits(out[scene.rows(fine)]), bits(healthy[scene.rows(fine)]))
    assert np.isnan(out[scene.rows(1)]).all()
    assert np.isnan(out[scene.rows(2)]).all()


@each_backend
def test_scores_beyond_float16_give_no_nan(backend: kernels.Backend):
    """Scores of 1e5 and more, which float16 cannot hold: the softmax is float32."""
    shape = tiny(backend, dtype="float16")
    scene = make_scene(shape, (Seq(9, 1), Seq(3, 1), Seq(0, 8), PADDING), seed=3)
    scene.q[...] *= np.float16(300)
    scene.k[...] *= np.float16(300)
    for place in range(9):
        page, offset = scene.tables[0][place // shape.page_size], place % shape.page_size
        scene.pages.values[0, scene.layer, page, offset] *= np.float16(300)
    out, _ = run(scene, backend)
    wanted, _ = expected(scene)
    assert np.abs(out.astype(np.float64) - wanted).max() <= shape.tolerance * 3


# -- sinks


@each_backend
@pytest.mark.parametrize("sink", [-np.inf, -1e4, 0.0, 30.0, 1e4])
def test_sinks_far_below_and_far_above_the_scores(sink: float, backend: kernels.Backend):
    """One that weighs nothing, and one that takes all of the weight."""
    shape = tiny(backend, sinks=True)
    seqs = Seq(0, 1), Seq(shape.max_len - 1, 1), Seq(shape.page_size, shape.query_block), PADDING
    scene = make_scene(shape, seqs, seed=0)
    assert scene.sinks is not None
    scene.sinks[0] = sink
    assert_right(scene, backend)


@each_backend
def test_a_sink_is_the_head_s_own(backend: kernels.Backend):
    """Only the first head has one, and only its output differs."""
    shape = tiny(backend)
    seqs = Seq(3, 1), Seq(shape.max_len - 1, 1), Seq(shape.page_size, shape.query_block), PADDING
    plain = make_scene(shape, seqs, seed=0)
    sinks = np.full(shape.heads, -np.inf, np.float32)
    sinks[0] = 2.0
    with_sink = dataclasses.replace(plain, shape=dataclasses.replace(shape, sinks=True), sinks=sinks)
    out, without = run(with_sink, backend)[0], run(plain, backend)[0]
    np.testing.assert_allclose(out[:, 1:], without[:, 1:], rtol=1e-5, atol=1e-6)
    real = np.abs(without[:, 0]).sum(axis=-1) > 0
    assert (np.abs(out[real, 0]).sum(axis=-1) < np.abs(without[real, 0]).sum(axis=-1)).all()


# -- quantised pools


@each_backend
@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
def test_rows_of_every_size_keep_their_own_scale(pool_dtype: str, backend: kernels.Backend):
    """From zeros and what float32 can just hold to 1e30; a large neighbour in the page costs a row no precision."""
    shape = tiny(backend, pool_dtype=pool_dtype)
    scene = make_scene(shape, (Seq(3, 1), PADDING, Seq(5, shape.query_block), PADDING), seed=0)
    sizes = np.resize([0.0, 1e-44, 1e-38, 1e-30, 1.0, 1e30], shape.query_block).astype(np.float32)
    scene.v[scene.rows(2)] *= sizes[:, None, None]
    scene.k[scene.rows(2)] *= np.minimum(sizes, 1)[:, None, None]
    out, pages = run(scene, backend)
    wanted, wanted_pages = expected(scene)
    pages.values[:, scene.layer, 0], pages.scales[:, scene.layer, 0] = 0, 0
    wanted_pages.values[:, scene.layer, 0], wanted_pages.scales[:, scene.layer, 0] = 0, 0
    np.testing.assert_array_equal(bits(pages.values), bits(wanted_pages.values))
    np.testing.assert_array_equal(bits(pages.scales), bits(wanted_pages.scales))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantisation_is_near_and_never_nan_for_finite_rows(dtype: str):
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        size = np.float32(10.0 ** data.draw(st.integers(-44, 37)))
        rows = rng.normal(size=(3, 2, 8)).astype(np.float32) * size
        rows[0, 0] = 0
        values, scales = (np.asarray(x) for x in jax.jit(kernels.quantize, static_argnums=1)(rows, dtype))
        right_values, right_scales = quantized(rows, jnp.dtype(dtype))
        np.testing.assert_array_equal(bits(values), bits(right_values))
        np.testing.assert_array_equal(bits(scales), bits(right_scales))
        assert not bits(values[0, 0]).any() and scales[0, 0] == 1
        again = values.astype(np.float64) * scales[..., None]
        step = 0.5 / 127 if dtype == "int8" else 1 / 16  # half a step of the largest; a relative rounding
        top = np.abs(rows).max(axis=-1, keepdims=True)
        allowed = step * top if dtype == "int8" else step * np.abs(rows) + top * 2**-19
        assert (np.abs(again - rows) <= allowed * 1.001 + 448 * 1.2e-38).all()

    check()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_scale_nan(dtype: str, broken: float):
    rows = np.ones((2, 2, 4), np.float32)
    rows[1, 0, 2] = broken
    values, scales = (np.asarray(x) for x in kernels.quantize(jnp.asarray(rows), dtype))
    np.testing.assert_array_equal(np.isnan(scales), [[False, False], [True, False]])
    assert not bits(values[1, 0]).any()


# -- the rest of the contract


def test_an_unknown_backend_is_named():
    spec = HARNESSES["xla"].tiny.spec
    with pytest.raises(ValueError, match="'cuda'; known: .*xla"):
        kernels.pool_spec(spec, "cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'cuda'; known: .*xla"):
        kernels.why_not("cuda", DEVICES["cpu"], spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("change, message", [
    ({"dtype": "int4"}, "'int4'.*float32, bfloat16, float16, int8, float8_e4m3fn"),
    ({"num_heads": 5, "num_kv_heads": 2}, "5 query heads cannot share 2 kv heads")])
def test_a_spec_that_cannot_be(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HARNESSES["xla"].tiny.spec, **change)


def test_token_rows_name_sequence_and_position():
    batch = make_scene(HARNESSES["xla"].tiny, (Seq(4, 1), PADDING, Seq(6, 3), PADDING), seed=0).batch
    seq, position, valid = (np.asarray(x) for x in kernels.token_rows(batch))
    real = [0, 2, 3, 4]
    np.testing.assert_array_equal(np.flatnonzero(valid), real)
    np.testing.assert_array_equal(seq[real], [0, 2, 2, 2])
    np.testing.assert_array_equal(position[real], [4, 6, 7, 8])
    assert not seq[~valid].any() and not position[~valid].any()


@each_backend
def test_a_pool_s_bytes_are_those_of_its_arrays(backend: kernels.Backend):
    """At least K and V, and with scales 4 bytes for each row of either; kv heads are the axis 1 that is sharded."""
    for shape in HARNESSES[backend].shapes.values():
        spec = shape.spec
        pool = kernels.init_pool(spec, backend)
        leaves = jax.tree.leaves(pool)
        assert sum(leaf.nbytes for leaf in leaves) == kernels.pool_bytes(spec, backend)
        rows = 2 * spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads
        row_bytes = spec.head_dim * jnp.dtype(spec.dtype).itemsize + (4 if spec.quantized else 0)
        assert kernels.pool_bytes(spec, backend) >= rows * row_bytes
        for leaf in leaves:
            assert leaf.shape[1] == shape.kv_heads


DEVICES = {
    "cpu": types.SimpleNamespace(platform="cpu", device_kind="cpu"),
    "T4": types.SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5"),
    "A100": types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"),
    "H100": types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0"),
    "v5e": types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_backend_and_is_told_why(name: str):
    device, spec = DEVICES[name], HARNESSES["xla"].tiny.spec
    choice = kernels.choose_backend(device, spec)
    assert device.device_kind in choice.reason
    assert kernels.why_not(choice.backend, device, spec) is None


@pytest.mark.parametrize("name", ["T4", "A100"])
def test_gpus_older_than_hopper_take_the_portable_path(name: str):
    choice = kernels.choose_backend(DEVICES[name], HARNESSES["xla"].tiny.spec)
    assert choice.backend == "xla" and DEVICES[name].compute_capability in choice.reason


@each_backend
def test_oracle_and_portable_path_run_everywhere(backend: kernels.Backend):
    objections = [kernels.why_not(backend, device, HARNESSES[backend].tiny.spec) for device in DEVICES.values()]
    assert all(objection is None for objection in objections) == (backend in ("reference", "xla"))
    assert all(backend in objection for objection in objections if objection is not None)
