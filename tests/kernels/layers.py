"""A stack of attention layers of a model's shape, lowered for a device that need not be there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas as kernels

_PLATFORMS = {"mosaic_tpu": "tpu", "mosaic_gpu": "cuda"}


def model(heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", page_size: int = 16,
          **more) -> kernels.AttentionSpec:
    return kernels.AttentionSpec(
        num_layers=4, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_pages=4096, page_size=page_size,
        dtype=dtype, scale=head_dim**-0.5, **more)


def lower_layers(backend: kernels.Backend, spec: kernels.AttentionSpec, decodes: int, chunks: int, windowed: bool,
                 sinks: bool, q_dtype: str = "bfloat16", **shaped) -> jax.stages.Lowered:
    """A scan over layers that carries the pool, which is donated: the decoder's way of using it.

    `shaped`: keyword arguments of jax.ShapeDtypeStruct for all arrays.
    """
    def layers(x, pool, batch, window, sink_logits):
        plan = kernels.plan_batch(batch, spec, backend)

        def body(carry, layer):
            x, pool = carry
            kv = x[:, :spec.num_kv_heads]
            out, pool = kernels.paged_attention(x, kv, kv, pool, plan, layer=layer, window=window, sinks=sink_logits,
                                                spec=spec, backend=backend)
            return (x + out, pool), None

        return lax.scan(body, (x, pool), jnp.arange(spec.num_layers, dtype=jnp.int32))[0]

    def array(*shape: int, dtype="int32") -> jax.Array:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), **shaped)  # type: ignore[return-value]

    seqs, rows = decodes + chunks, decodes + chunks * spec.query_block
    batch = kernels.AttentionBatch(block_tables=array(seqs, 128), kv_lens=array(seqs), query_starts=array(seqs),
                                   query_lens=array(seqs), num_decode=decodes, num_tokens=rows)
    pool = jax.tree.map(lambda leaf: array(*leaf.shape, dtype=leaf.dtype), kernels.pool_spec(spec, backend))
    return jax.jit(layers, donate_argnums=1).trace(
        array(rows, spec.num_heads, spec.head_dim, dtype=q_dtype), pool, batch, array() if windowed else None,
        array(spec.num_heads, dtype="float32") if sinks else None).lower(lowering_platforms=(_PLATFORMS[backend],))
