"""Runs the sampler on small batches, and the same semantics in numpy float64, written independently.

One compiled shape serves most tests: compiling the sampler costs more than running all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.request import SequenceOptions
from jaxserve.sampling.sampler import SampleOutput, sample
from jaxserve.sampling.slots import Int, SlotState, abstract_slots, admit, init_slots, pack_slot

VOCAB = 200   # two blocks, the second one not full
VALID = 197   # the rest is padding of the embedding
ROWS = 256
SLOTS = 256
MAX_LEN = 64
MAX_LOGPROBS = 5


def options(**fields) -> SequenceOptions:
    return SequenceOptions(**{"max_tokens": 32, "temperature": 0.0, **fields})


@dataclass(frozen=True)
class Request:
    """A sequence in a slot: its options, and its ids so far."""

    options: SequenceOptions
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


_admit = jax.jit(admit)


def make_slots(requests: Sequence[Request], slots: SlotState | None = None) -> SlotState:
    """Slots 0, 1, ... hold `requests`; the others hold what was in `slots`."""
    slots = init_slots(SLOTS, MAX_LEN, VOCAB) if slots is None else slots
    for slot, request in enumerate(requests):
        ints, floats = pack_slot(request.options, len(request.prompt), [*request.prompt, *request.output],
                                 MAX_LEN, VOCAB)
        slots = _admit(slots, np.int32(slot), ints, floats)
    return slots


@cache
def _compiled(rows: int):
    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    return jax.jit(partial(sample, valid_vocab=VALID, max_logprobs=MAX_LOGPROBS)).lower(
        leaf(jnp.float32, VOCAB), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.bool_),
        abstract_slots(SLOTS, MAX_LEN, VOCAB)).compile()


def run(logits, slots: SlotState, slot_ids, positions, *, rows: int = ROWS, active=True) -> SampleOutput:
    """Samples from `logits` [R, VOCAB], padded with inactive rows to a batch of `rows`. Numpy leaves [R, ...]."""
    count = len(logits)
    padding = rows - count
    out = _compiled(rows)(
        np.concatenate([np.asarray(logits, np.float32), np.full((padding, VOCAB), np.nan, np.float32)]),
        np.concatenate([slot_ids, np.full(padding, SLOTS)]).astype(np.int32),
        np.concatenate([positions, np.zeros(padding)]).astype(np.int32),
        (np.arange(rows) < count) & active, slots)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], out)


def sample_requests(logits, requests: Sequence[Request], *, rows: int = ROWS) -> SampleOutput:
    """The next token of each request."""
    return run(logits, make_slots(requests), range(len(requests)), [r.position for r in requests], rows=rows)


def draw_by_seed(logits_row, request: Request, count: int) -> np.ndarray:
    """`count` draws of one request's next token, with seeds 0, 1, ... i32[count]."""
    one = make_slots([request])
    slots = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), one)
    logits, positions = np.tile(logits_row, (ROWS, 1)), np.full(ROWS, request.position)
    ids = []
    for start in range(0, count, ROWS):
        seeds = start + np.arange(SLOTS + 1)
        out = run(logits, slots.replace(ints=slots.ints.at[:, Int.SEED_LOW].set(seeds)), range(ROWS), positions)
        assert not out.faults.any()
        ids.append(out.ids)
    return np.concatenate(ids)[:count]


def draw_by_position(logits_row, request: Request, count: int) -> np.ndarray:
    """`count` draws by one seed, at as many positions. i32[count]."""
    slots, logits = make_slots([request]), np.tile(logits_row, (ROWS, 1))
    starts = range(request.position, request.position + count, ROWS)
    ids = [run(logits, slots, np.zeros(ROWS), start + np.arange(ROWS)).ids for start in starts]
    return np.concatenate(ids)[:count]


def processed(logits_row, request: Request) -> np.ndarray:
    """float64[VOCAB]: the logits that a token is chosen from, step by step as documented."""
    x = np.array(logits_row, np.float64)
    o = request.options
    history = [*request.prompt, *request.output]
    x[VALID:] = -np.inf

    if o.allowed_token_ids is not None:
        x[[i for i in range(VOCAB) if i not in set(o.allowed_token_ids)]] = -np.inf
    if len(request.output) < o.min_tokens:
        x[list(o.eos_ids | o.stop_ids)] = -np.inf
    for *prefix, last in o.bad_words:
        if history[len(history) - len(prefix):] == prefix and len(history) >= len(prefix):
            x[last] = -np.inf

    for token, bias in o.logit_bias:
        x[token] += bias

    for token in set(history):
        x[token] = x[token] / o.repetition_penalty if x[token] > 0 else x[token] * o.repetition_penalty
    for token, times in Counter(request.output).items():
        x[token] -= o.presence_penalty + o.frequency_penalty * times
    return x


def distribution(logits_row, request: Request) -> np.ndarray:
    """float64[VOCAB]: what the next token is drawn from."""
    x = processed(logits_row, request)
    o = request.options
    order = np.lexsort((np.arange(VOCAB), -x))  # descending, lower ids first among equals
    if o.temperature == 0:
        return np.eye(VOCAB)[order[0]]
    p = np.exp((x[order] - x[order[0]]) / o.temperature)
    if o.top_k > 0:
        p[o.top_k:] = 0.0
    if o.top_p < 1.0:
        mass_before = np.cumsum(p) - p
        p[mass_before >= o.top_p * p.sum()] = 0.0
    p[p < o.min_p * p[0]] = 0.0
    out = np.zeros(VOCAB)
    out[order] = p / p.sum()
    return out


def random_logits(seed: int, rows: int = 1, scale: float = 3.0) -> np.ndarray:
    """f32[rows, VOCAB]; the padding of the vocabulary is larger than all the rest."""
    logits = np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * np.float32(scale)
    logits[:, VALID:] = 1e5
    return logits
