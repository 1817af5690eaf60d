"""Per-slot state on the device: each running sequence's ids and sampling options.

A slot is admitted once, by one small upload; from then on a step only names the slot. The tables (end ids,
biases, bad words, allowed ids) keep what an earlier sequence left there: counts and flags in `ints` say what
of them is valid, so a request without them uploads zeros that nobody reads.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxserve.engine.request import SequenceOptions
from jaxserve.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
)


class Int(enum.IntEnum):
    """Columns of `SlotState.ints`."""

    PROMPT_LEN = 0
    MIN_LEN = 1          # prompt_len + min_tokens: end ids are masked at positions below it
    TOP_K = 2            # 0: off
    SEED_HIGH = 3        # uint32 bits
    SEED_LOW = 4
    LOGPROBS = 5         # -1: none asked for
    PROMPT_LOGPROBS = 6  # -1: none asked for
    NUM_END_IDS = 7
    NUM_BIAS = 8
    NUM_BAD_WORDS = 9
    HAS_ALLOWED = 10


class Float(enum.IntEnum):
    """Columns of `SlotState.floats`."""

    TEMPERATURE = 0      # 0: greedy
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


@struct.dataclass
class SlotState:
    """Leaves have one row a slot, and a last one (the dummy slot) that padding rows of a batch name."""

    tokens: jax.Array       # i32[N+1, max_len]  prompt and generated ids
    ints: jax.Array         # i32[N+1, len(Int)]
    floats: jax.Array       # f32[N+1, len(Float)]
    end_ids: jax.Array      # i32[N+1, MAX_END_IDS]
    bias_ids: jax.Array     # i32[N+1, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # f32[N+1, MAX_LOGIT_BIAS]
    bad_words: jax.Array    # i32[N+1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]  right-aligned, filled with -1
    allowed: jax.Array      # u32[N+1, ceil(V/32)]  bit i of word w: id 32 w + i


@struct.dataclass
class SlotOptions:
    """The scalar options of the slots in one batch. The properties are `[S]` columns, read where they are used:
    two operands go through the step's conditionals instead of one for each option, which compiles faster."""

    ints: jax.Array    # i32[S, len(Int)]
    floats: jax.Array  # f32[S, len(Float)]

    def __getitem__(self, column: Int | Float) -> jax.Array:
        return (self.ints if isinstance(column, Int) else self.floats)[:, column]

    @property
    def seed(self) -> jax.Array:
        """u32[S, 2]."""
        return lax.bitcast_convert_type(self.ints[:, Int.SEED_HIGH:Int.SEED_LOW + 1], jnp.uint32)


def abstract_slots(num_slots: int, max_len: int, vocab_size: int) -> SlotState:
    """The state's shapes and dtypes, as ShapeDtypeStructs."""

    def leaf(dtype, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots + 1, *shape), jnp.dtype(dtype))

    return SlotState(
        tokens=leaf(jnp.int32, max_len),
        ints=leaf(jnp.int32, len(Int)),
        floats=leaf(jnp.float32, len(Float)),
        end_ids=leaf(jnp.int32, MAX_END_IDS),
        bias_ids=leaf(jnp.int32, MAX_LOGIT_BIAS),
        bias_values=leaf(jnp.float32, MAX_LOGIT_BIAS),
        bad_words=leaf(jnp.int32, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        allowed=leaf(jnp.uint32, -(-vocab_size // 32)),
    )


def init_slots(num_slots: int, max_len: int, vocab_size: int) -> SlotState:
    """Slots without a sequence: zeros, that want no logprobs. So does the dummy slot for ever."""
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
                         abstract_slots(num_slots, max_len, vocab_size))
    return replace(state, ints=state.ints.at[:, [Int.LOGPROBS, Int.PROMPT_LOGPROBS]].set(-1))


def _int_sizes(max_len: int, vocab_size: int) -> dict[str, int]:
    """Lengths of the sections of `pack_slot`'s ints, in order."""
    return {
        "ints": len(Int),
        "end_ids": MAX_END_IDS,
        "bias_ids": MAX_LOGIT_BIAS,
        "bad_words": MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS,
        "allowed": -(-vocab_size // 32),
        "tokens": max_len,
    }


def packed_sizes(max_len: int, vocab_size: int) -> tuple[int, int]:
    """Lengths of the two vectors that `pack_slot` makes and `admit` takes."""
    return sum(_int_sizes(max_len, vocab_size).values()), len(Float) + MAX_LOGIT_BIAS


def _split(vector, sizes: dict[str, int]) -> dict:
    """Views of the consecutive sections of a numpy or jax vector."""
    sections, start = {}, 0
    for name, size in sizes.items():
        sections[name] = vector[start:start + size]
        start += size
    return sections


def pack_slot(
    options: SequenceOptions, prompt_len: int, token_ids: Sequence[int], max_len: int, vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence's slot as two vectors to upload: i32 and f32, of `packed_sizes`. Host only (numpy).

    Args:
        options: resolved options, as many as the tables hold; ids in them are in [0, vocab_size).
        prompt_len: tokens of the prompt; the rest of `token_ids` was generated before a preemption.
        token_ids: all ids known to the host, at most `max_len`.
        max_len, vocab_size: as in `init_slots`.
    """
    end_ids = sorted(options.eos_ids | options.stop_ids)
    assert len(end_ids) <= MAX_END_IDS and len(options.logit_bias) <= MAX_LOGIT_BIAS
    assert len(options.bad_words) <= MAX_BAD_WORDS
    assert all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in options.bad_words)
    assert options.top_k >= 0 and (options.temperature == 0 or options.temperature >= GREEDY_TEMPERATURE)

    num_ints, num_floats = packed_sizes(max_len, vocab_size)
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    sections = _split(ints, _int_sizes(max_len, vocab_size))

    scalars = sections["ints"]
    scalars[Int.PROMPT_LEN] = prompt_len
    scalars[Int.MIN_LEN] = prompt_len + options.min_tokens
    scalars[Int.TOP_K] = options.top_k
    scalars[Int.SEED_HIGH:Int.SEED_LOW + 1] = np.array(
        [options.seed >> 32 & 0xFFFFFFFF, options.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    scalars[Int.LOGPROBS] = -1 if options.logprobs is None else options.logprobs
    scalars[Int.PROMPT_LOGPROBS] = -1 if options.prompt_logprobs is None else options.prompt_logprobs
    scalars[Int.NUM_END_IDS] = len(end_ids)
    scalars[Int.NUM_BIAS] = len(options.logit_bias)
    scalars[Int.NUM_BAD_WORDS] = len(options.bad_words)
    scalars[Int.HAS_ALLOWED] = options.allowed_token_ids is not None

    floats[Float.TEMPERATURE] = options.temperature
    floats[Float.TOP_P] = options.top_p
    floats[Float.MIN_P] = options.min_p
    floats[Float.REPETITION] = options.repetition_penalty
    floats[Float.PRESENCE] = options.presence_penalty
    floats[Float.FREQUENCY] = options.frequency_penalty

    sections["tokens"][:len(token_ids)] = token_ids
    sections["end_ids"][:len(end_ids)] = end_ids
    if options.logit_bias:
        sections["bias_ids"][:len(options.logit_bias)] = [token for token, _ in options.logit_bias]
        floats[len(Float):len(Float) + len(options.logit_bias)] = [value for _, value in options.logit_bias]
    if options.bad_words:
        words = sections["bad_words"].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        words[:len(options.bad_words)] = -1
        for row, word in zip(words, options.bad_words, strict=False):
            row[-len(word):] = word
    if options.allowed_token_ids is not None:
        bits = np.zeros(sections["allowed"].size * 32, np.uint8)
        bits[list(options.allowed_token_ids)] = 1
        sections["allowed"][:] = np.packbits(bits, bitorder="little").view("<i4")
    return ints, floats


def admit(slots: SlotState, slot: jax.Array, ints: jax.Array, floats: jax.Array) -> SlotState:
    """Writes what `pack_slot` made into row `slot` (i32 scalar). Pure; the caller jits it and donates `slots`."""
    max_len, words = slots.tokens.shape[1], slots.allowed.shape[1]
    rows = _split(ints, _int_sizes(max_len, words * 32))
    rows["allowed"] = lax.bitcast_convert_type(rows["allowed"], jnp.uint32)
    rows |= _split(floats, {"floats": len(Float), "bias_values": MAX_LOGIT_BIAS})

    def put(name: str) -> jax.Array:
        leaf = getattr(slots, name)
        return lax.dynamic_update_index_in_dim(leaf, rows[name].reshape(leaf.shape[1:]), slot, 0)

    return replace(slots, **{name: put(name) for name in rows})


def slot_options(slots: SlotState, slot_ids: jax.Array) -> SlotOptions:
    """The scalar options of slots `slot_ids` i32[S], which are in range."""
    return SlotOptions(ints=take_rows(slots.ints, slot_ids), floats=take_rows(slots.floats, slot_ids))


def take_rows(leaf: jax.Array, slot_ids: jax.Array) -> jax.Array:
    """Rows `slot_ids` i32[S] of one leaf of the state."""
    return leaf.at[slot_ids].get(mode="promise_in_bounds")
