"""Which token is drawn: from the right distribution, by the row's own seed and position, and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve.engine.results import Fault
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.slots import abstract_slots
from tests.sampling.harness import (
    ROWS,
    SLOTS,
    VALID,
    VOCAB,
    Request,
    distribution,
    draw_by_position,
    draw_by_seed,
    make_slots,
    options,
    random_logits,
    run,
    sample_requests,
)

DRAWS = 4 * ROWS
FLAT = np.zeros(VOCAB, np.float32)


def assert_drawn_from(ids: np.ndarray, expected: np.ndarray) -> None:
    """Nothing outside the support, and a chi-square as it is in all but one of 1e5 cases."""
    counts = np.bincount(ids, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected * len(ids) >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * len(ids)
    observed, wanted = observed[wanted > 1e-6], wanted[wanted > 1e-6]
    if len(wanted) > 1:
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        assert stats.chi2.sf(statistic, len(wanted) - 1) > 1e-5


FILTERS = {
    "temperature": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 7},
    "top_k, large": {"top_k": 150, "temperature": 3.0},
    "top_k, large, and top_p": {"top_k": 150, "top_p": 0.97, "temperature": 3.0},
    "top_p": {"top_p": 0.8},
    "top_p, wide": {"top_p": 0.99, "temperature": 2.0},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7, "temperature": 2.0},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "top_k and min_p": {"top_k": 40, "min_p": 0.05, "temperature": 2.0},
    "all three": {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
    "with processors": {"top_k": 40, "top_p": 0.95, "allowed_token_ids": tuple(range(0, 190, 2)),
                        "logit_bias": ((2, 4.0), (4, -5.0)), "repetition_penalty": 1.5, "presence_penalty": 1.0,
                        "bad_words": ((6,),)},
}


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_reference_distribution(fields):
    logits = random_logits(11, scale=2.0)[0]
    request = Request(options(**{"temperature": 1.0, **fields}), prompt=[2, 3], output=[8])
    assert_drawn_from(draw_by_seed(logits, request, DRAWS), distribution(logits, request))


@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.5}], ids=str)
def test_positions_are_independent_draws_and_ties_are_kept_by_id(fields):
    request = Request(options(temperature=1.0, seed=5, **fields))
    ids = draw_by_position(FLAT, request, 2 * DRAWS)
    assert_drawn_from(ids, distribution(FLAT, request))
    pairs = ids[:-1].astype(np.int64) * VOCAB + ids[1:]
    assert len(np.unique(pairs)) > len(pairs) // 2 or len(np.unique(ids)) <= 20


def test_any_mix_of_options_draws_from_what_they_keep():
    rng = np.random.default_rng(12)
    logits = random_logits(12, ROWS)
    logits[::2] = np.round(logits[::2])  # many ties
    requests = [Request(options(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])), top_k=int(rng.choice([0, 1, 2, 50, 140, 500])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.1])), min_p=float(rng.choice([0.0, 0.01, 0.3])),
        repetition_penalty=float(rng.choice([1.0, 1.2])), seed=row), prompt=rng.integers(0, VALID, 9).tolist())
        for row in range(ROWS)]
    out = sample_requests(logits, requests)
    kept = [distribution(logits[row], request)[out.ids[row]] for row, request in enumerate(requests)]
    assert not out.faults.any()
    # The one thing float64 may see otherwise: on which side of top_p the last entry falls, and equals to it.
    assert np.mean(np.array(kept) > 0) >= 0.99


# --- greedy, and what equals it


GREEDY = {
    "temperature 0": {},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-9},
    "denormal top_p": {"temperature": 1.0, "top_p": 1e-45},
    "one allowed": {"temperature": 1.0, "allowed_token_ids": (150,), "logit_bias": ((150, -100.0),)},
}


@pytest.mark.parametrize("fields", GREEDY.values(), ids=GREEDY)
def test_a_point_distribution_is_greedy_and_ties_go_to_the_lowest_id(fields):
    logits = random_logits(21, ROWS)
    logits[:, [150, 160]] = 20.0
    logits[0, :VALID] = 0.0
    logits[1, :VALID] = -7.0
    requests = [Request(options(**fields, seed=row)) for row in range(ROWS)]
    expected = [150 if "allowed_token_ids" in fields else row[:VALID].argmax() for row in logits]
    assert sample_requests(logits, requests).ids.tolist() == expected


def test_min_p_one_keeps_the_best_and_its_equals():
    logits = random_logits(22)[0]
    logits[[40, 180]] = 15.0
    assert set(draw_by_seed(logits, Request(options(temperature=1.0, min_p=1.0)), ROWS)) == {40, 180}


@pytest.mark.parametrize("top_k", [0, VALID, VOCAB + 1, 2**31 - 1])
def test_top_k_without_effect_changes_no_draw(top_k):
    logits = random_logits(23, scale=0.5)[0]
    plain = draw_by_position(logits, Request(options(temperature=1.0, seed=9)), ROWS)
    limited = draw_by_position(logits, Request(options(temperature=1.0, seed=9, top_k=top_k)), ROWS)
    assert plain.tolist() == limited.tolist()


# --- a row depends on itself


MIXED = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 150, "top_p": 0.9}, {"min_p": 0.1},
         {"top_k": 20, "top_p": 0.5, "logprobs": 5}, {"repetition_penalty": 1.3, "logprobs": 1},
         {"allowed_token_ids": (1, 2, 3)}]


def mixed_requests() -> list[Request]:
    return [Request(options(**{"temperature": 1.0, "seed": i, **fields}), prompt=[i, 7]) for i, fields in
            enumerate(MIXED)]


def test_a_row_is_the_same_bit_by_bit_alone_and_in_any_batch():
    requests, logits = mixed_requests(), random_logits(31, len(MIXED), scale=1.0)
    together = sample_requests(logits, requests)
    order = np.random.default_rng(0).permutation(len(MIXED))
    shuffled = sample_requests(logits[order], [requests[i] for i in order])
    for place, row in enumerate(order):
        alone = sample_requests(logits[row:row + 1], [requests[row]], rows=4)
        for out, index in ((shuffled, place), (alone, 0)):
            assert out.ids[index] == together.ids[row]
            if requests[row].options.logprobs is not None:
                jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[index], b[row]),  # noqa: B023
                             out.logprobs, together.logprobs)


def test_a_broken_row_is_reported_and_its_neighbours_do_not_notice():
    requests, logits = mixed_requests(), random_logits(32, len(MIXED))
    fine = sample_requests(logits, requests)
    for row, value in ((1, np.nan), (3, np.inf), (4, -np.inf)):
        broken = logits.copy()
        broken[row, 60 if np.isnan(value) or value > 0 else slice(None)] = value
        out = sample_requests(broken, requests)
        assert np.flatnonzero(out.faults).tolist() == [row]
        assert out.ids[row] == 0
        others = np.arange(len(MIXED)) != row
        assert out.ids[others].tolist() == fine.ids[others].tolist()


def test_a_row_whose_masks_leave_nothing_is_reported():
    out = sample_requests(random_logits(33, 2), [
        Request(options(allowed_token_ids=(5,), bad_words=((5,),))), Request(options())])
    assert out.faults.tolist() == [Fault.NOTHING_LEFT, 0]
    assert out.ids[0] == 0


def test_a_model_that_leaves_nothing_is_not_taken_for_masks():
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[1] = random_logits(34)[0]
    out = sample_requests(logits, [Request(options()), Request(options(bad_words=((5,),)))])
    assert out.faults.tolist() == [Fault.NOT_FINITE, 0]


def test_padding_rows_choose_nothing_and_fail_nothing():
    requests = [Request(options(temperature=1.0, top_p=0.5, logprobs=5))] * 4
    out = run(np.full((4, VOCAB), np.nan), make_slots(requests), range(4), [3] * 4, active=False)
    assert out.ids.tolist() == [0] * 4 and not out.faults.any()
    assert (out.logprobs.top_ids == -1).all()  # not even computed


# --- seeds


def test_equal_seeds_repeat_and_others_differ():
    def draws(seed: int) -> list[int]:
        return draw_by_position(FLAT, Request(options(temperature=1.0, seed=seed)), 8).tolist()

    seeds = [0, 1, 2**31, 2**32, 2**33, 2**63, 2**64 - 1]  # all 64 bits count
    assert draws(7) == draws(7)
    assert len({tuple(draws(seed)) for seed in seeds}) == len(seeds)


def test_choices_of_one_request_differ():
    requests = [Request(options(temperature=1.0, seed=1000 + choice)) for choice in range(8)]
    assert len(set(sample_requests(np.tile(FLAT, (8, 1)), requests).ids.tolist())) > 2


def test_draws_depend_neither_on_jaxs_configuration_nor_on_the_number_of_logprobs():
    request = Request(options(temperature=1.0, seed=3, logprobs=0))
    expected = draw_by_position(FLAT, request, 4).tolist()
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        out = jax.jit(partial(sample, valid_vocab=VALID, max_logprobs=0))(
            np.tile(FLAT, (4, 1)), np.zeros(4, np.int32), np.arange(3, 7), np.ones(4, bool), make_slots([request]))
    assert out.ids.tolist() == expected
    assert out.logprobs.top_ids.shape == (4, 0)
    np.testing.assert_allclose(out.logprobs.token_logprob, -np.log(VALID), rtol=1e-6)


# --- extreme logits


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.5}],
                         ids=str)
def test_extreme_logits_are_drawn_right(fields):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 9, 150]] = 6e4, 6e4, -6e4
    logits[VALID:] = np.nan  # nobody looks at the padding
    for temperature in 1.0, 2e-5, 1e30:
        request = Request(options(temperature=temperature, **fields))
        ids = draw_by_seed(logits, request, ROWS)
        logits64 = np.where(np.isnan(logits), -np.inf, logits)
        assert_drawn_from(ids, distribution(logits64, request))


# --- what a greedy batch executes


def primitives(jaxpr, inside_cond: bool) -> set[str]:
    """Names of the primitives that always run; with `inside_cond` also those in branches."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if eqn.primitive.name == "cond" and not inside_cond:
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                names |= primitives(inner, inside_cond)
    return names


def test_a_greedy_batch_runs_an_argmax_and_nothing_else():
    """Everything costly stands in branches that a greedy batch does not take."""
    jaxpr = jax.make_jaxpr(partial(sample, valid_vocab=VOCAB, max_logprobs=5))(
        jnp.zeros((4, VOCAB)), jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4, bool),
        abstract_slots(SLOTS, 64, VOCAB)).jaxpr
    costly = {"sort", "top_k", "while", "cumsum", "exp", "log", "scatter-add", "scatter-max", "threefry2x32",
              "random_fold_in"}
    assert costly - {"while", "threefry2x32"} <= primitives(jaxpr, inside_cond=True)
    assert not primitives(jaxpr, inside_cond=False) & costly

    conds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(conds) == 2  # choosing, and logprobs
    for eqn in conds:
        cheap = eqn.params["branches"][0].jaxpr  # taken when nobody samples, changes logits or wants logprobs
        assert not primitives(cheap, inside_cond=True) & (costly | {"cond"})
