"""Changes to the logits before a token is chosen, in this order (all in float32):

1. raw logprobs are taken from the untouched logits (logprobs.py);
2. rows of the embedding beyond the tokenizer (`valid_vocab` and above) are masked;
3. masks: allowed_token_ids, end ids while fewer than min_tokens are generated, last tokens of bad words;
4. logit_bias;
5. repetition penalty, then presence and frequency penalties;
6. temperature, top_k, top_p, min_p and the draw (sampler.py). A greedy row takes the argmax after step 5.

A mask *adds* -inf instead of setting it, so that a NaN or +inf logit, which would mean a broken model, is still
found afterwards: it leaves a NaN. Each step runs under a `lax.cond` and only if an active row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.slots import Float, Int, SlotOptions, SlotState, take_rows

HISTORY_CHUNK = 512  # ids counted at a time for penalties, so that a long max_len costs nothing to short rows


def mask_padding(logits: jax.Array, valid_vocab: int) -> jax.Array:
    """Masks ids >= valid_vocab, whatever stands there. `[S, V]` -> `[S, V]`."""
    if valid_vocab == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < valid_vocab, logits, -jnp.inf)


def changes_logits(options: SlotOptions, positions: jax.Array) -> jax.Array:
    """bool[S]: which rows `process` would change."""
    return (options[Int.HAS_ALLOWED] > 0) | _edits(options, positions) | _penalised(options)


def process(
    logits: jax.Array,
    slot_ids: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    slots: SlotState,
    options: SlotOptions,
) -> jax.Array:
    """Steps 3 to 5. `logits` f32[S, V]; `positions` i32[S], where the token to choose will be written."""
    stages = (
        (options[Int.HAS_ALLOWED] > 0, lambda x: x + _allowed_mask(slots, slot_ids, options, x.shape[-1])),
        (_edits(options, positions), lambda x: _add_edits(x, slot_ids, positions, slots, options)),
        (_penalised(options), lambda x: _penalise(x, take_rows(slots.tokens, slot_ids), positions, options)),
    )
    for wanted, stage in stages:
        logits = lax.cond(jnp.any(active & wanted), stage, lambda x: x, logits)
    return logits


def _masks_end_ids(options: SlotOptions, positions: jax.Array) -> jax.Array:
    return (options[Int.NUM_END_IDS] > 0) & (positions < options[Int.MIN_LEN])


def _edits(options: SlotOptions, positions: jax.Array) -> jax.Array:
    return (options[Int.NUM_BIAS] > 0) | (options[Int.NUM_BAD_WORDS] > 0) | _masks_end_ids(options, positions)


def _penalised(options: SlotOptions) -> jax.Array:
    return ((options[Float.REPETITION] != 1.0) | (options[Float.PRESENCE] != 0.0)
            | (options[Float.FREQUENCY] != 0.0))


def _allowed_mask(slots: SlotState, slot_ids: jax.Array, options: SlotOptions, vocab: int) -> jax.Array:
    """f32[S, vocab]: 0 where the id is allowed or the row has no such mask, else -inf."""
    words = take_rows(slots.allowed, slot_ids)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(words.shape[0], -1)[:, :vocab]
    return jnp.where((bits == 1) | (options[Int.HAS_ALLOWED] == 0)[:, None], 0.0, -jnp.inf)


def _add_edits(
    logits: jax.Array, slot_ids: jax.Array, positions: jax.Array, slots: SlotState, options: SlotOptions,
) -> jax.Array:
    """Steps 3 and 4 as one scatter-add: end ids and bad words get -inf, biased ids their bias.

    The order of the additions does not matter: with -inf among them the sum is -inf.
    """
    nowhere = logits.shape[-1]  # out of bounds: dropped

    def first(table: jax.Array, count: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(table.shape[-1]) < count[:, None], take_rows(table, slot_ids), nowhere)

    masked = jnp.concatenate([
        first(slots.end_ids, jnp.where(_masks_end_ids(options, positions), options[Int.NUM_END_IDS], 0)),
        _completed_bad_words(slot_ids, positions, slots, options, nowhere),
    ], axis=-1)
    ids = jnp.concatenate([masked, first(slots.bias_ids, options[Int.NUM_BIAS])], axis=-1)
    values = jnp.concatenate([
        jnp.full(masked.shape, -jnp.inf, jnp.float32), take_rows(slots.bias_values, slot_ids)], axis=-1)
    return _each_row(lambda row, ids, values: row.at[ids].add(values, mode="drop"), logits, ids, values)


def _completed_bad_words(
    slot_ids: jax.Array, positions: jax.Array, slots: SlotState, options: SlotOptions, nowhere: int,
) -> jax.Array:
    """i32[S, MAX_BAD_WORDS]: ids that would complete a bad word after the row's history, else `nowhere`.

    The history is prompt and output: a word that begins at the prompt's end is not completed either.
    """
    words = take_rows(slots.bad_words, slot_ids)  # [S, words, width]
    before = positions[:, None] + jnp.arange(1 - words.shape[-1], 0)  # [S, width-1]
    history = slots.tokens.at[slot_ids[:, None], jnp.maximum(before, 0)].get(mode="promise_in_bounds")
    history = jnp.where(before >= 0, history, -2)  # equals no id
    prefix = words[:, :, :-1]
    matches = ((prefix == -1) | (prefix == history[:, None, :])).all(axis=-1)
    used = jnp.arange(words.shape[1]) < options[Int.NUM_BAD_WORDS][:, None]
    return jnp.where(matches & used, words[:, :, -1], nowhere)


def _penalise(logits: jax.Array, tokens: jax.Array, positions: jax.Array, options: SlotOptions) -> jax.Array:
    """Step 5. Neutral values leave a row's logits as they are, bit by bit.

    Repetition (CTRL, https://arxiv.org/abs/1909.05858, sign-aware as in all engines): positive logits of ids
    in prompt or output are divided by it, others multiplied. Presence and frequency (OpenAI): ids in the
    output lose `presence` once and `frequency` for each time.
    """
    seen, counts = _count_history(tokens, options[Int.PROMPT_LEN], positions, logits.shape[-1])
    repetition, presence, frequency = (
        options[column][:, None] for column in (Float.REPETITION, Float.PRESENCE, Float.FREQUENCY))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    return jnp.where(counts > 0, logits - (presence + frequency * counts), logits)


def _count_history(
    tokens: jax.Array, prompt_len: jax.Array, positions: jax.Array, vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """Which ids stand in `tokens[s, :positions[s]]`, and how often behind the prompt. bool, i32[S, vocab].

    Both are made in one array: an output adds 2, and a prompt id makes a zero 1.
    """
    max_len = tokens.shape[1]
    chunks = -(-jnp.max(positions) // HISTORY_CHUNK)

    def mark_row(tokens: jax.Array, prompt_len: jax.Array, position: jax.Array) -> jax.Array:
        def add_chunk(chunk: jax.Array, marks: jax.Array) -> jax.Array:
            at = chunk * HISTORY_CHUNK + jnp.arange(HISTORY_CHUNK)
            ids = tokens.at[jnp.minimum(at, max_len - 1)].get(mode="promise_in_bounds")
            is_prompt = at < prompt_len
            is_output = ~is_prompt & (at < position)
            marks = marks.at[jnp.where(is_prompt, ids, vocab)].max(1, mode="drop")
            return marks.at[jnp.where(is_output, ids, vocab)].add(2, mode="drop")

        return lax.fori_loop(0, chunks, add_chunk, jnp.zeros(vocab, jnp.int32))

    marks = _each_row(mark_row, tokens, prompt_len, positions)
    return marks > 0, marks >> 1


def _each_row(f: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """`f` of each row of the arrays, which scatters into it.

    All rows in one scatter, but for TPUs row by row: libtpu sorts the ids of a scatter first, by a network of
    comparisons as straight code, and for those of 64 rows compiled 5 to 9 s (libtpu 0.0.42.1), for one row's 0.5 s.
    """
    return lax.platform_dependent(*rows, tpu=lambda *rows: lax.map(lambda row: f(*row), rows), default=jax.vmap(f))
