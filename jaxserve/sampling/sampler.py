"""Chooses one token a row: argmax, or a draw from what top_k, top_p and min_p keep.

**Order.** A row's entries are ordered by logit, descending, and by id among equals. top_k keeps the first k;
top_p keeps the smallest set of first entries whose mass (in what top_k kept) reaches p, so at least one;
min_p keeps entries with at least that share of the best one's probability. So ties at a threshold are
resolved by the lowest id, and top_k=1 is greedy.

**Method.** Nothing is sorted. An entry is drawn by inverse CDF; one pass over the logits then sums the mass
(and number) of the entries before it in that order, which says whether top_k and top_p keep it. If not, the
next draw is from the entries before it alone, with the block sums just made. An accepted entry is distributed
as in the truncated distribution, because entries are only excluded that do not belong to it (rejection
sampling with a rising pivot, as in FlashInfer, https://flashinfer.ai/2025/03/10/sampling.html). The expected
number of passes is about 1/top_p, and logarithmic for top_k. min_p is a known bound: a draw below it raises the
pivot to it at once. Only top_k and top_p together need more: the mass that top_k keeps, from a partial top-k.

**Random numbers.** Draw i of a row uses threefry2x32 of (seed, position, i) and nothing else, so a row's
token depends on its own logits, options and history only: not on neighbours, batch size or jax's
configuration. One 64-bit word gives two uniforms: one chooses the block, one the entry in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxserve.engine.results import Fault
from jaxserve.sampling import blocks
from jaxserve.sampling.logprobs import LogprobOutput, empty_logprobs, gather_logprobs
from jaxserve.sampling.processors import changes_logits, mask_padding, process
from jaxserve.sampling.slots import Float, Int, SlotOptions, SlotState, slot_options

SMALL_TOP_K = 128  # up to here the mass of the top k comes from a partial top-k, beyond from a bisection


@struct.dataclass
class SampleOutput:
    """`faults`: 0, or the `engine.results.Fault` for which a row has no id; `ids` has 0 there."""

    ids: jax.Array     # i32[S]
    faults: jax.Array  # i32[S]
    logprobs: LogprobOutput


def sample(
    logits: jax.Array,
    slot_ids: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    slots: SlotState,
    *,
    valid_vocab: int,
    max_logprobs: int,
) -> SampleOutput:
    """Chooses the next token of each row.

    Args:
        logits: f32[S, V], of each row's last known token.
        slot_ids: i32[S]; padding rows name the dummy slot.
        positions: i32[S], the index in the slot's history where the chosen token will be written.
        active: bool[S]; False for padding rows, which get id 0 and ask for nothing.
        slots: per-slot history and options.
        valid_vocab: ids from here to V are never chosen (padding of the embedding).
        max_logprobs: columns of the logprob tables.
    """
    options = slot_options(slots, slot_ids)
    changed = active & changes_logits(options, positions)
    sampled = active & (options[Float.TEMPERATURE] > 0)
    wants_logprobs = active & (options[Int.LOGPROBS] >= 0)

    def best(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, ids = blocks.argmax(x)
        has_nan = blocks.has_nan(x)
        # Of a row that nothing masks it is the model that leaves nothing.
        fault = jnp.where(changed & (top == -jnp.inf) & ~has_nan, Fault.NOTHING_LEFT, Fault.NOT_FINITE)
        return top, ids, jnp.where(jnp.isfinite(top) & ~has_nan, 0, fault)

    def choose_greedy() -> tuple[jax.Array, jax.Array]:
        _, ids, faults = best(blocks.to_blocks(mask_padding(logits, valid_vocab)))
        return ids, faults

    def choose() -> tuple[jax.Array, jax.Array]:
        x = lax.cond(
            jnp.any(changed),
            lambda: process(mask_padding(logits, valid_vocab), slot_ids, positions, active, slots, options),
            lambda: mask_padding(logits, valid_vocab))
        x = blocks.to_blocks(x)
        top, greedy_ids, faults = best(x)
        ids = lax.cond(
            jnp.any(sampled),
            lambda: _draw_tokens(x, top, greedy_ids, sampled & (faults == 0), positions, options, valid_vocab),
            lambda: greedy_ids)
        return ids, faults

    ids, faults = lax.cond(jnp.any(changed | sampled), choose, choose_greedy)
    ids = jnp.where(active & (faults == 0), ids, 0)
    logprobs = lax.cond(
        jnp.any(wants_logprobs),
        lambda: gather_logprobs(logits, ids, max_logprobs, valid_vocab=valid_vocab),
        lambda: empty_logprobs(ids.shape[0], max_logprobs))
    return SampleOutput(ids=ids, faults=jnp.where(active, faults, 0), logprobs=logprobs)


class _Pivot(NamedTuple):
    """A place in the rows' order: an entry is before it if greater, or equal with a lower id. Leaves `[S]`."""

    value: jax.Array  # f32
    id: jax.Array     # i32


class _Distribution(NamedTuple):
    """Rows of logits with their temperature. Probabilities are relative to the best entry's, which is 1."""

    x: jax.Array            # f32[S, B, L]
    top: jax.Array          # f32[S]
    temperature: jax.Array  # f32[S]

    def weights(self, x: jax.Array) -> jax.Array:
        """Of logits x `[S, ...]`. The maximum is subtracted before the division, so nothing overflows."""
        top, temperature = (a.reshape(-1, *[1] * (x.ndim - 1)) for a in (self.top, self.temperature))
        return jnp.exp((x - top) / temperature)

    def before(self, pivot: _Pivot) -> jax.Array:
        """bool[S, B, L]: entries before the pivot."""
        ids = jnp.arange(self.x.shape[1] * blocks.BLOCK, dtype=jnp.int32).reshape(self.x.shape[1:])
        return _is_before(self.x, ids, pivot)

    def mass_before(self, pivot: _Pivot) -> jax.Array:
        """f32[S, B]: sum of each block's weights before the pivot."""
        return jnp.where(self.before(pivot), self.weights(self.x), 0.0).sum(axis=-1)

    def count_before(self, pivot: _Pivot) -> jax.Array:
        """i32[S]."""
        return self.before(pivot).sum(axis=-1, dtype=jnp.int32).sum(axis=-1)


def _is_before(x: jax.Array, ids: jax.Array, pivot: _Pivot) -> jax.Array:
    value, id = (a.reshape(-1, *[1] * (x.ndim - 1)) for a in pivot)
    return (x > value) | ((x == value) & (ids < id))


def _draw_tokens(
    x: jax.Array,
    top: jax.Array,
    greedy_ids: jax.Array,
    sampled: jax.Array,
    positions: jax.Array,
    options: SlotOptions,
    valid_vocab: int,
) -> jax.Array:
    """A draw for the rows in `sampled`, `greedy_ids` for the others. i32[S]; x f32[S, B, L]."""
    dist = _Distribution(x, top, jnp.where(sampled, options[Float.TEMPERATURE], 1.0))
    limits_k = sampled & (options[Int.TOP_K] > 0) & (options[Int.TOP_K] < valid_vocab)
    limits_p = sampled & (options[Float.TOP_P] < 1.0)
    limits_min_p = sampled & (options[Float.MIN_P] > 0.0)

    def draw(mass: jax.Array, pivot: _Pivot, attempt: jax.Array) -> _Pivot:
        """An entry before the pivot, by the block sums `mass` [S, B] of those entries."""
        u = _uniforms(options.seed, positions, attempt)
        block = jnp.maximum(_invert_cdf(mass, u[:, 0]), 0)
        values = blocks.take_block(x, block)  # [S, L]
        ids = block[:, None] * blocks.BLOCK + jnp.arange(blocks.BLOCK, dtype=jnp.int32)
        lane = _invert_cdf(jnp.where(_is_before(values, ids, pivot), dist.weights(values), 0.0), u[:, 1])
        # Only a block whose weights all underflow has no entry to give; the best entry always may stand in.
        at = jnp.maximum(lane, 0)[:, None]
        value = jnp.where(lane < 0, top, blocks.take(values, at)[:, 0])
        return _Pivot(value, jnp.where(lane < 0, greedy_ids, blocks.take(ids, at)[:, 0]))

    all_mass = dist.weights(x).sum(axis=-1)  # [S, B]; nothing is masked, so XLA:CPU fuses it without a [S, V] copy

    # What top_p is a share of: the mass that top_k keeps, before min_p.
    limits_both = limits_k & limits_p
    mass_kept = lax.cond(
        jnp.any(limits_both),
        lambda: jnp.where(limits_both, _mass_of_top_k(dist, options[Int.TOP_K], limits_both), all_mass.sum(axis=-1)),
        lambda: all_mass.sum(axis=-1))
    # exp((bound - top) / temperature) == min_p; entries equal to the bound are kept.
    bound = jnp.where(limits_min_p, top + options[Float.TEMPERATURE] * jnp.log(options[Float.MIN_P]), -jnp.inf)
    before_all = jnp.full_like(positions, jnp.iinfo(jnp.int32).max)

    def attempt(state):
        drawn, done, pivot, mass, number = state
        drawn = _choose(done, drawn, draw(mass, pivot, number))
        above = drawn.value >= bound
        done = done | (above & ~(limits_k | limits_p)) | (drawn.id == greedy_ids)

        def check():
            # A draw below min_p's bound fails; then the next one is from the entries above the bound.
            pivot = _choose(above, drawn, _Pivot(bound, before_all))
            mass = dist.mass_before(pivot)
            count = lax.cond(jnp.any(limits_k & ~done), dist.count_before, lambda _: jnp.zeros_like(positions), pivot)
            outside = ((limits_p & (mass.sum(axis=-1) >= options[Float.TOP_P] * mass_kept))
                       | (limits_k & (count >= options[Int.TOP_K])))
            return done | (above & ~outside), pivot, mass

        done, pivot, mass = lax.cond(jnp.all(done), lambda: (done, pivot, mass), check)
        return drawn, done, pivot, mass, number + 1

    greedy = _Pivot(top, greedy_ids)
    anything = _Pivot(jnp.full_like(top, -jnp.inf), before_all)
    drawn, *_ = lax.while_loop(
        lambda state: ~jnp.all(state[1]), attempt, (greedy, ~sampled, anything, all_mass, jnp.int32(0)))
    return drawn.id


def _choose(condition: jax.Array, yes: _Pivot, no: _Pivot) -> _Pivot:
    return jax.tree.map(lambda y, n: jnp.where(condition, y, n), yes, no)


def _uniforms(seed: jax.Array, positions: jax.Array, attempt: jax.Array) -> jax.Array:
    """f32[S, 2] in [0, 1) of (seed u32[S, 2], position i32[S], attempt i32 scalar).

    A folded key *is* one threefry block of (key, number): 64 random bits, taken directly because jax.random.bits
    would depend on the process-wide jax_threefry_partitionable. Numbers of two positions never meet: no draw
    takes 4096 attempts.
    """
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    words = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, positions * 4096 + attempt))
    return (words >> 8).astype(jnp.float32) * 2.0**-24


def _invert_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    """i32[S]: index drawn from `weights` f32[S, n] >= 0 by `u` f32[S]; -1 if all are zero.

    Never an entry of weight zero: a parallel prefix sum may rise by rounding where the weight is zero.
    """
    cdf = jnp.cumsum(weights, axis=-1)
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    beyond = jnp.where((weights > 0) & (cdf > (u * cdf[:, -1])[:, None]), index, weights.shape[-1]).min(axis=-1)
    last = jnp.where(weights > 0, index, -1).max(axis=-1)
    return jnp.minimum(beyond, last)


def _mass_of_top_k(dist: _Distribution, k: jax.Array, needed: jax.Array) -> jax.Array:
    """f32[S]: mass of each row's first `k` entries, for rows in `needed`.

    A row's method depends on its own k alone, never on its neighbours'.
    """
    width = min(SMALL_TOP_K, dist.x.shape[1] * blocks.BLOCK)
    small = k <= SMALL_TOP_K
    zeros = jnp.zeros_like(dist.top)

    def by_partial_top_k() -> jax.Array:
        values, _ = blocks.top_k(dist.x, width)
        return jnp.where(jnp.arange(width) < k[:, None], dist.weights(values), 0.0).sum(axis=-1)

    def by_bisection() -> jax.Array:
        kth = _Pivot(_kth_largest(dist.x, k), jnp.full_like(k, -1))  # before it: strictly greater entries
        ties = k - dist.count_before(kth)
        return dist.mass_before(kth).sum(axis=-1) + ties * dist.weights(kth.value)

    return jnp.where(small,
                     lax.cond(jnp.any(needed & small), by_partial_top_k, lambda: zeros),
                     lax.cond(jnp.any(needed & ~small), by_bisection, lambda: zeros))


def _kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """f32[S]: the k[S]-th largest of x f32[S, B, L], by bisection over the floats' order-preserving integers."""

    def to_int(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    keys = to_int(x)

    def halve(_, bounds):
        low, high = bounds  # count(keys >= low) >= k > count(keys > high)
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        enough = (keys >= middle[:, None, None]).sum(axis=-1, dtype=jnp.int32).sum(axis=-1) >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    limits = jnp.iinfo(jnp.int32)
    bounds = (jnp.full_like(k, limits.min), jnp.full_like(k, limits.max))
    low, _ = lax.fori_loop(0, 32, halve, bounds)
    return lax.bitcast_convert_type(jnp.where(low < 0, low ^ 0x7FFFFFFF, low), jnp.float32)
