"""The pool is updated where it lies: no second copy of it, in no dtype and no jax version."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kernels_pallas as kernels
from tests.kernels.scenes import Shape

NUM_PAGES = 2048


def compiled_layers(shape: Shape, backend: kernels.Backend) -> tuple[jax.stages.Compiled, kernels.AttentionSpec]:
    """A scan over layers that carries the pool, which is donated: the decoder's way of using it."""
    spec = dataclasses.replace(shape.spec, num_layers=3, num_pages=NUM_PAGES)

    def layers(x, pool, batch, window):
        plan = kernels.plan_batch(batch, spec, backend)

        def body(carry, layer):
            x, pool = carry
            kv = x[:, :shape.kv_heads]
            out, pool = kernels.paged_attention(x, kv, kv, pool, plan, layer=layer, window=window, spec=spec,
                                                backend=backend)
            return (x + out, pool), None

        (x, pool), _ = lax.scan(body, (x, pool), jnp.arange(spec.num_layers, dtype=jnp.int32))
        return x, pool

    ints = jax.ShapeDtypeStruct((shape.num_seqs,), jnp.int32)
    batch = kernels.AttentionBatch(
        block_tables=jax.ShapeDtypeStruct((shape.num_seqs, shape.pages_per_seq), jnp.int32),  # type: ignore[arg-type]
        kv_lens=ints, query_starts=ints, query_lens=ints,  # type: ignore[arg-type]
        num_decode=shape.decodes, num_tokens=shape.num_tokens)
    x = jax.ShapeDtypeStruct((shape.num_tokens, shape.heads, shape.head_dim), jnp.dtype(shape.dtype))
    window = jax.ShapeDtypeStruct((), jnp.int32) if shape.windowed else None
    lowered = jax.jit(layers, donate_argnums=1).lower(x, kernels.pool_spec(spec, backend), batch, window)
    return lowered.compile(), spec


@pytest.mark.parametrize("pool_dtype, decodes, chunks", [
    ("float32", 8, 2), ("bfloat16", 8, 2), ("float16", 8, 2), ("bfloat16", 8, 0), ("bfloat16", 0, 2),
    ("int8", 8, 2), ("float8_e4m3fn", 8, 2), ("float8_e4m3fn", 8, 0), ("float8_e4m3fn", 0, 2)])
def test_the_pool_is_aliased_and_no_temporary_is_of_its_size(pool_dtype: str, decodes: int, chunks: int):
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, pages_per_seq=8, decodes=decodes, chunks=chunks,
                  dtype="float32" if jnp.dtype(pool_dtype).itemsize == 1 else pool_dtype, pool_dtype=pool_dtype,
                  windowed=True)
    compiled, spec = compiled_layers(shape, "xla")
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kernels.pool_bytes(spec, "xla")
    assert memory.temp_size_in_bytes < 0.1 * kernels.pool_bytes(spec, "xla")
    # Memory analysis is an estimate of buffers; that no pool is copied or converted stands in the program itself.
    for leaf in jax.tree.leaves(kernels.pool_spec(spec, "xla")):
        pool_shape = re.escape(f"[{','.join(map(str, leaf.shape))}]")
        assert not re.search(rf"= \w+{pool_shape}\S* (copy|convert|bitcast-convert)\(", compiled.as_text())
