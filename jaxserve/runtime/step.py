"""The step: one pure function from (parameters, state, batch) to (state, output).

The host uploads which tokens of which slots to compute (see batch.py); the ids themselves, and all
sampling options, are on the device already. Sampled ids are written into the slot's history, where the
next step finds them, so a step never waits for the host to read the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

import kernels_pallas as kernels
from jaxserve.models.decoder import decode_tokens, logits
from jaxserve.models.params import DecoderParams
from jaxserve.models.spec import DecoderSpec
from jaxserve.runtime.batch import NUM_COLUMNS, NUM_TOKENS, SAMPLES, SLOT, START
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.state import DeviceState
from jaxserve.sampling.sampler import LogprobOutput, gather_logprobs, sample
from jaxserve.sampling.slots import Int


@struct.dataclass
class StepOutput:
    """K is the bucket's decode_steps, S its sequences, Q its prefill rows.

    token_ids: i32[K, S], the sampled ids, or an `engine.results.Fault`; 0 where nothing was sampled. logprobs:
        leading axes [K, S], zeros unless a row asked. prompt_logprobs: leading axis [Q], for prefill row r the
        entry of the token that follows it; zeros unless asked; None without prefill rows.
    """

    token_ids: jax.Array
    logprobs: LogprobOutput
    prompt_logprobs: LogprobOutput | None


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is static for every bucket of an engine.

    `valid_vocab`: ids below it may be sampled; the embedding may have more rows than the tokenizer ids.
    `native_linear_rows`: buckets of up to so many token rows multiply with the native CPU kernel.
    """

    model: DecoderSpec
    attention: kernels.AttentionSpec
    backend: kernels.Backend
    valid_vocab: int
    max_logprobs: int
    native_linear_rows: int = 0


def step(spec: StepSpec, bucket: Bucket, params: DecoderParams, state: DeviceState,
         batch: jax.Array) -> tuple[DeviceState, StepOutput]:
    """Computes one step. `state` is meant to be donated; `spec` and `bucket` are static.

    Args:
        batch: i32[S, NUM_COLUMNS + pages_per_seq] from `batch.pack`.
    """
    if bucket.decode_steps == 1:
        state, ids, logprobs, prompt_logprobs = _forward(spec, bucket, params, state, batch)
        stack = jax.tree.map(lambda x: x[None], (ids, logprobs))
        return state, StepOutput(token_ids=stack[0], logprobs=stack[1], prompt_logprobs=prompt_logprobs)

    remaining = batch[:, NUM_TOKENS]

    def body(k, carry):
        state, ids, logprobs = carry
        now = batch.at[:, START].add(k).at[:, NUM_TOKENS].set((k < remaining).astype(jnp.int32))
        now = now.at[:, SAMPLES].set((k < remaining) & (batch[:, SAMPLES] > 0))
        state, step_ids, step_logprobs, _ = _forward(spec, bucket, params, state, now)
        return state, ids.at[k].set(step_ids), jax.tree.map(lambda all_, x: all_.at[k].set(x), logprobs, step_logprobs)

    empty = jax.tree.map(lambda x: jnp.zeros((bucket.decode_steps, *x.shape), x.dtype),
                         jax.eval_shape(lambda: _forward(spec, bucket, params, state, batch)[1:3]))
    state, ids, logprobs = lax.fori_loop(0, remaining.max(), body, (state, *empty))
    return state, StepOutput(token_ids=ids, logprobs=logprobs, prompt_logprobs=None)


def _forward(spec: StepSpec, bucket: Bucket, params: DecoderParams, state: DeviceState, batch: jax.Array):
    """One pass: (state, ids i32[S], logprobs [S], prompt logprobs [Q] or None)."""
    slots, attention = state.slots, spec.attention
    slot, start, count = batch[:, SLOT], batch[:, START], batch[:, NUM_TOKENS]
    samples = batch[:, SAMPLES] > 0
    dummy_slot = slots.tokens.shape[0] - 1

    D = bucket.decode_rows
    chunk_rows = -(-count[D:] // attention.query_block) * attention.query_block
    chunk_starts = D + jnp.cumsum(chunk_rows) - chunk_rows
    ragged = kernels.AttentionBatch(
        block_tables=batch[:, NUM_COLUMNS:],
        kv_lens=jnp.where(count > 0, start + count, 0),
        query_starts=jnp.concatenate([jnp.arange(D, dtype=jnp.int32), chunk_starts.astype(jnp.int32)]),
        query_lens=count,
        num_decode=D,
        num_tokens=bucket.num_tokens,
    )
    seq, positions, valid = kernels.token_rows(ragged)               # [T]
    row_slot = jnp.where(valid, slot[seq], dummy_slot)
    token_ids = jnp.where(valid, slots.tokens[row_slot, positions], 0)

    plan = kernels.plan_batch(ragged, attention, spec.backend)

    def attend(q, k, v, pool, layer, window):
        return kernels.paged_attention(q, k, v, pool, plan, layer=layer, window=window, spec=attention,
                                       backend=spec.backend)

    hidden, pool = decode_tokens(spec.model, params, token_ids, positions, state.pool, attend,
                                 native_linear=bucket.num_tokens <= spec.native_linear_rows)

    last = jnp.clip(ragged.query_starts + count - 1, 0, bucket.num_tokens - 1)
    next_position = jnp.where(samples, start + count, 0)
    sampled = sample(logits(spec.model, params, hidden[last]), slot, next_position, samples, slots,
                     valid_vocab=spec.valid_vocab, max_logprobs=spec.max_logprobs)
    ids = jnp.where(samples, sampled.ids, 0)
    write_slot = jnp.where(samples, slot, dummy_slot)
    new_slots = slots.replace(tokens=slots.tokens.at[write_slot, next_position].set(ids))

    prompt_logprobs = None
    if bucket.prefill_rows:
        prompt_logprobs = _prompt_logprobs(spec, params, slots, hidden[D:], row_slot[D:], positions[D:])
    return (DeviceState(pool=pool, slots=new_slots), jnp.where(samples & (sampled.faults < 0), sampled.faults, ids),
            sampled.logprobs, prompt_logprobs)


def _prompt_logprobs(spec: StepSpec, params: DecoderParams, slots: Any, hidden: jax.Array, row_slot: jax.Array,
                     positions: jax.Array) -> LogprobOutput:
    """Log-probabilities of the prompt tokens that follow each prefill row, a query block at a time."""
    block = spec.attention.query_block
    target_at = jnp.minimum(positions + 1, slots.tokens.shape[1] - 1)
    targets = slots.tokens[row_slot, target_at]                      # [Q]
    wanted = slots.ints[row_slot, Int.PROMPT_LOGPROBS] >= 0          # [Q]; the dummy slot wants none

    def of_block(inputs):
        hidden, targets, wanted = inputs

        def compute():
            return gather_logprobs(logits(spec.model, params, hidden), targets, spec.max_logprobs,
                                   valid_vocab=spec.valid_vocab)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))
        return lax.cond(wanted.any(), compute, lambda: zeros)

    blocks = (hidden.reshape(-1, block, hidden.shape[-1]), targets.reshape(-1, block), wanted.reshape(-1, block))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(of_block, blocks))
