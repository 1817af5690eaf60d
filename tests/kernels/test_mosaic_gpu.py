"""The Hopper kernels: what is always run of the shared body, and what is their own."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import kernels_pallas as kernels
from kernels_pallas import mosaic_gpu
from kernels_pallas.mosaic_gpu import layout
from kernels_pallas.mosaic_gpu.combine import combine
from kernels_pallas.mosaic_gpu.decode import STATS_ROWS
from kernels_pallas.mosaic_gpu.plan import SPLIT_TOKENS, max_splits
from tests.kernels.backends import assert_right
from tests.kernels.mosaic_gpu_harness import SHAPES, TINY
from tests.kernels.scenes import PADDING, Seq, Shape, make_scene, scenes

H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")

# (query heads, kv heads, head dim) of Llama-3-8B, Qwen3-0.6B, Gemma-2-9B, SmolLM2-135M, gpt-oss, and the largest group
MODELS = [(32, 8, 128), (16, 8, 128), (16, 8, 256), (9, 3, 64), (64, 8, 64), (24, 1, 256)]


def spec_of(heads: int, kv_heads: int, head_dim: int, **changes) -> kernels.AttentionSpec:
    values = {"num_layers": 2, "num_pages": 64, "page_size": 16, "dtype": "bfloat16", "scale": head_dim**-0.5}
    return kernels.AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **values | changes)


# -- the kernels, interpreted


def test_contexts_at_the_borders_of_pages_steps_and_parts():
    """Decode rows from one token to several parts, a padding row; a chunk that continues a context and one that
    starts, neither of whole query blocks."""
    seqs = Seq(0, 1), PADDING, Seq(SPLIT_TOKENS, 1), Seq(63, 1), Seq(271, 1), Seq(100, 37), Seq(0, 9), PADDING
    shape = dataclasses.replace(SHAPES["mixed"], chunks=3)
    assert_right(make_scene(shape, seqs, seed=0), "mosaic_gpu")


def test_window_soft_cap_and_sinks_together():
    seqs = Seq(200, 1), Seq(8, 1), PADDING, Seq(130, 21), Seq(0, 3), PADDING, PADDING
    assert_right(make_scene(SHAPES["all features"], seqs, seed=1, window=70), "mosaic_gpu")


def test_pages_larger_than_a_step_and_heads_of_256():
    seqs = Seq(199, 1), Seq(64, 1), Seq(127, 8), Seq(2, 6)
    assert_right(make_scene(SHAPES["large heads"], seqs, seed=2, window=65), "mosaic_gpu")


# -- what they can do


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "float32"}, "KV pool of float32"), ({"dtype": "int8"}, "KV pool of int8"),
    ({"dtype": "float8_e4m3fn"}, "KV pool of float8_e4m3fn"), ({"page_size": 24}, "pages of 24 tokens"),
    ({"page_size": 4}, "pages of 4 tokens"), ({"query_block": 24}, "query blocks of 24 rows")])
def test_what_is_missing_is_named_and_the_portable_path_taken(changes: dict, reason: str):
    choice = kernels.choose_backend(H100, spec_of(32, 8, 128, **changes))
    assert choice.backend == "xla" and reason in choice.reason


@pytest.mark.parametrize("heads, kv_heads, head_dim, reason", [
    (8, 8, 80, "head_dim 80"), (32, 1, 64, "32 query heads a kv head")])
def test_shapes_that_do_not_fit_wgmma_take_the_portable_path(heads: int, kv_heads: int, head_dim: int, reason: str):
    choice = kernels.choose_backend(H100, spec_of(heads, kv_heads, head_dim))
    assert choice.backend == "xla" and reason in choice.reason


@pytest.mark.parametrize("model", MODELS)
def test_hopper_takes_these_kernels(model: tuple[int, int, int]):
    assert kernels.choose_backend(H100, spec_of(*model)).backend == "mosaic_gpu"


@pytest.mark.parametrize("capability", ["8.9", "10.0", "12.0"])
def test_no_other_generation_takes_them(capability: str):
    """wgmma exists on Hopper alone; compiling it for Blackwell ends the process."""
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)
    assert kernels.choose_backend(device, spec_of(32, 8, 128)).backend == "xla"


@pytest.mark.parametrize("model, page_size", [
    *((model, 16) for model in MODELS), *((MODELS[0], page_size) for page_size in (8, 64, 256))])
def test_every_shape_lowers_within_shared_memory(model: tuple[int, int, int], page_size: int):
    """Lowering checks the 232448 bytes of a block, tilings and layouts; no GPU and no compiler is needed."""
    H, _, D = model
    spec = spec_of(*model, page_size=page_size, softcap=30.0)
    decode, prefill = layout.decode_layout(spec), layout.prefill_layout(spec)
    assert decode.stages >= 2 and prefill.stages >= 2

    def call(q, kv, pool, batch, window, sinks):
        plan = kernels.plan_batch(batch, spec, "mosaic_gpu")
        return kernels.paged_attention(q, kv, kv, pool, plan, layer=jnp.int32(1), window=window, sinks=sinks,
                                       spec=spec, backend="mosaic_gpu")

    ints = jax.ShapeDtypeStruct((6,), jnp.int32)
    batch = kernels.AttentionBatch(
        block_tables=jax.ShapeDtypeStruct((6, 8), jnp.int32), kv_lens=ints, query_starts=ints,  # type: ignore[arg-type]
        query_lens=ints, num_decode=4, num_tokens=4 + 2 * spec.query_block)  # type: ignore[arg-type]
    rows = [jax.ShapeDtypeStruct((batch.num_tokens, heads, D), jnp.bfloat16) for heads in (H, spec.num_kv_heads)]
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(call).trace(*rows, kernels.pool_spec(spec, "mosaic_gpu"), batch,
                                      jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((H,), jnp.float32)
                                      ).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


# -- the plan


@settings(max_examples=20)
@given(scene=scenes(TINY))
def test_the_parts_of_a_context_are_listed_once(scene):
    plan = kernels.plan_batch(scene.batch, TINY.spec, "mosaic_gpu").decode
    items = np.asarray(plan.items)[:int(plan.num_items)]
    listed = [tuple(item) for item in items]
    wanted = []
    for i, seq in enumerate(scene.seqs[:TINY.decodes]):
        parts = min(-(-seq.kv_len // SPLIT_TOKENS), plan.max_splits)
        wanted += [(i, part, parts, seq.kv_len) for part in range(parts)]
    assert listed == wanted


@pytest.mark.parametrize("query_block, heads", [(8, 1), (32, 1), (32, 4), (128, 2)])
def test_tiles_cover_each_row_of_each_chunk_once(query_block: int, heads: int):
    shape = Shape(heads=heads, kv_heads=1, head_dim=64, page_size=16, pages_per_seq=20, decodes=2, chunks=5,
                  query_block=query_block, dtype="bfloat16")

    @settings(max_examples=20)
    @given(scene=scenes(shape))
    def check(scene) -> None:
        plan = kernels.plan_batch(scene.batch, shape.spec, "mosaic_gpu").prefill
        found, ends = [], []
        for first, seq, position, rows in np.asarray(plan.tiles)[:int(plan.num_tiles)]:
            assert 1 <= rows <= layout.prefill_layout(shape.spec).tile_tokens
            found += [(first + row, seq, position + row) for row in range(rows)]
            ends.append(position + rows)
        wanted = []
        for i, seq in enumerate(scene.seqs[2:]):
            start = scene.starts[2 + i] - 2
            wanted += [(start + row, i, seq.start + row) for row in range(seq.count)]
        assert sorted(found) == wanted
        assert ends == sorted(ends, reverse=True)

    check()


def test_few_sequences_are_cut_finer_than_many():
    spec = spec_of(32, 8, 128)
    parts = [max_splits(n, spec, 4096) for n in (1, 8, 64, 256)]
    assert parts == [64, 9, 4, 4]
    assert max_splits(1, spec, 2 * SPLIT_TOKENS // spec.page_size) == 2


# -- joining parts


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), sink=st.booleans())
def test_parts_join_to_one_softmax(seed: int, sink: bool):
    """Parts that a context does not have hold NaN; a part in which nothing was seen has no weight."""
    rng = np.random.default_rng(seed)
    S, most, K, G, D = 3, 4, 2, 2, 64
    splits = np.array([0, 1, 3], np.int32)
    scores, values = rng.normal(size=(S, most, K, G, 5)) * 3, rng.normal(size=(S, most, K, 5, D))
    sinks = rng.normal(size=(K, G)) if sink else None
    partials = np.full((S, most, K, D + STATS_ROWS, 8), np.nan, np.float32)
    wanted = np.zeros((S, K, G, D))
    for s, parts in enumerate(splits):
        for part in range(parts):
            for k, g in np.ndindex(K, G):
                x = scores[s, part, k, g] * np.log2(np.e)
                if part == 1:
                    scores[s, part, k, g] = -np.inf
                    partials[s, part, k, :, g] = 0
                    partials[s, part, k, D, g] = -1e20
                    continue
                weights = np.exp2(x - x.max())
                partials[s, part, k, :D, g] = weights @ values[s, part, k]
                partials[s, part, k, D, g], partials[s, part, k, D + 1, g] = x.max(), weights.sum()
        if parts:
            weights = np.exp(scores[s, :parts])                                    # [parts, K, G, 5]
            total = weights.sum((0, 3)) + (np.exp(sinks) if sinks is not None else 0)
            wanted[s] = np.einsum("pkgn,pknd->kgd", weights, values[s, :parts]) / total[..., None]
    given_sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    out = combine(jnp.asarray(partials), jnp.asarray(splits), given_sinks, group=G)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


def test_the_queries_are_rounded_to_the_pool_and_the_output_is_not():
    shape = dataclasses.replace(TINY, dtype="float32", pool_dtype="bfloat16")
    with mosaic_gpu.interpreted():
        spec, ints = shape.spec, jax.ShapeDtypeStruct((shape.num_seqs,), jnp.int32)
        batch = kernels.AttentionBatch(
            block_tables=jax.ShapeDtypeStruct((shape.num_seqs, shape.pages_per_seq), jnp.int32),  # type: ignore[arg-type]
            kv_lens=ints, query_starts=ints, query_lens=ints,  # type: ignore[arg-type]
            num_decode=shape.decodes, num_tokens=shape.num_tokens)
        q = jax.ShapeDtypeStruct((shape.num_tokens, shape.heads, shape.head_dim), jnp.float32)
        kv = jax.ShapeDtypeStruct((shape.num_tokens, shape.kv_heads, shape.head_dim), jnp.float32)

        def call(q, kv, pool, batch):
            plan = kernels.plan_batch(batch, spec, "mosaic_gpu")
            return kernels.paged_attention(q, kv, kv, pool, plan, layer=jnp.int32(0), window=None, spec=spec,
                                           backend="mosaic_gpu")

        out, pool = jax.eval_shape(call, q, kv, kernels.pool_spec(spec, "mosaic_gpu"), batch)
    assert out.dtype == jnp.float32 and pool["k"].dtype == jnp.bfloat16
