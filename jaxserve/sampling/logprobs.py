"""Log-probabilities under the model's raw logits: before temperature, penalties and masks."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling import blocks
from jaxserve.sampling.processors import mask_padding

# What a probability of zero is reported as: the lowest finite float32, since JSON has no -inf.
FLOOR = float(jnp.finfo(jnp.float32).min)


@struct.dataclass
class LogprobOutput:
    """`k` best entries and the target's. Entries beyond the vocabulary have id -1."""

    token_logprob: jax.Array  # f32[R]
    token_rank: jax.Array     # i32[R]     1 + how many logits are greater than the target's
    top_ids: jax.Array        # i32[R, k]  best first, lower ids first among equals
    top_logprobs: jax.Array   # f32[R, k]


def empty_logprobs(rows: int, k: int) -> LogprobOutput:
    """What rows get that asked for none."""
    return LogprobOutput(
        token_logprob=jnp.zeros(rows, jnp.float32),
        token_rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.full((rows, k), -1, jnp.int32),
        top_logprobs=jnp.full((rows, k), FLOOR, jnp.float32),
    )


def gather_logprobs(logits: jax.Array, target_ids: jax.Array, k: int, *, valid_vocab: int) -> LogprobOutput:
    """log_softmax over ids < valid_vocab of `logits` f32[R, V]: of `target_ids` i32[R], and the k best.

    A target beyond them, which only a prompt may hold, has probability zero.
    A row with a NaN or +inf logit gives NaN; other rows are not touched by it.
    """
    x = blocks.to_blocks(mask_padding(logits, valid_vocab))  # [R, B, L]
    top = x.max(axis=(1, 2))
    log_sum = jnp.log(jnp.exp(x - top[:, None, None]).sum(axis=-1).sum(axis=-1)) + top

    target = jnp.where(target_ids < valid_vocab, blocks.take(logits, target_ids[:, None])[:, 0], -jnp.inf)
    rank = 1 + (x > target[:, None, None]).sum(axis=-1, dtype=jnp.int32).sum(axis=-1)

    out = empty_logprobs(logits.shape[0], k)
    found = min(k, valid_vocab)
    if found:
        values, ids = blocks.top_k(x, found)
        out = replace(
            out,
            top_ids=out.top_ids.at[:, :found].set(ids),
            top_logprobs=out.top_logprobs.at[:, :found].set(jnp.maximum(values - log_sum[:, None], FLOOR)))
    return replace(out, token_logprob=jnp.maximum(target - log_sum, FLOOR), token_rank=rank)
