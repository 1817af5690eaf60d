"""Paged attention over a preallocated KV page pool, for JAX. Knows nothing of jaxserve."""

from kernels_pallas.api import (
    POOL_DTYPES,
    AttentionBatch,
    AttentionSpec,
    Backend,
    Choice,
    choose_backend,
    init_pool,
    paged_attention,
    plan_batch,
    pool_bytes,
    pool_spec,
    token_rows,
    why_not,
)
from kernels_pallas.quantize import quantize

__all__ = ["POOL_DTYPES", "AttentionBatch", "AttentionSpec", "Backend", "Choice", "choose_backend", "init_pool",
           "paged_attention", "plan_batch", "pool_bytes", "pool_spec", "quantize", "token_rows", "why_not"]
