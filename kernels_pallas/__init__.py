"""Paged attention over a preallocated KV page pool, for JAX. Knows nothing of jaxserve."""

from kernels_pallas.api import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    choose_backend,
    init_pool,
    paged_attention,
    plan_batch,
    pool_spec,
    token_rows,
)

__all__ = ["AttentionBatch", "AttentionSpec", "Backend", "choose_backend", "init_pool", "paged_attention",
           "plan_batch", "pool_spec", "token_rows"]
