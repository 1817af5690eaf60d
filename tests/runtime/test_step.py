"""The step as a program: what it may do, what it costs, and that padding is nothing to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.request import StepPlan
from jaxserve.engine.results import LogprobRows, StepResult
from jaxserve.runtime.batch import NUM_COLUMNS
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.programs import ADMIT, EnginePlan
from jaxserve.runtime.step import step
from tests.runtime.rig import VOCAB, Rig, make_plan, prompt

KINDS = {"decode": Bucket(3, 0), "prefill": Bucket(0, 64), "mixed": Bucket(3, 64), "four at once": Bucket(3, 0, 4)}


def traced(bucket: Bucket) -> Any:
    plan = make_plan(decode_steps=bucket.decode_steps)
    assert bucket in plan.buckets
    batch = jax.ShapeDtypeStruct((bucket.num_seqs(32), NUM_COLUMNS + plan.config.max_pages_per_seq), jnp.int32)
    return jax.make_jaxpr(partial(step, plan.step, bucket))(plan.params, jax.eval_shape(plan.init_state), batch)


# -- what it may do


@pytest.mark.parametrize("bucket", KINDS.values(), ids=KINDS)
def test_it_has_no_side_effects_and_calls_nothing_on_the_host(bucket):
    jaxpr = traced(bucket)
    assert not jaxpr.effects
    assert not [name for name, *_ in equations(jaxpr.jaxpr) if "callback" in name or "infeed" in name]


def test_a_greedy_batch_sorts_nothing():
    """Whatever sorts logits, or counts tokens in them, is under a conditional that greedy rows do not take."""
    ways = [(name, conditional) for name, size, conditional in equations(traced(Bucket(3, 0)).jaxpr)
            if name in ("sort", "top_k", "cumsum", "threefry2x32") and size >= VOCAB]
    assert ways  # they are there,
    assert all(conditional for _, conditional in ways)  # but not on every batch's way


def equations(jaxpr: Any, conditional: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(primitive, size of its largest operand, whether it is inside a conditional) of everything in a program."""
    for equation in jaxpr.eqns:
        yield (equation.primitive.name, max((np.size(v.aval) for v in equation.invars), default=0), conditional)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, conditional or equation.primitive.name == "cond")


# -- what it costs


def check_in_place(plan: EnginePlan, program: jax.stages.Compiled) -> None:
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == num_bytes(jax.eval_shape(plan.init_state))
    assert memory.temp_size_in_bytes < 0.1 * plan.pool_bytes


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("bucket", make_plan().buckets, ids=str)
def test_the_state_is_updated_in_place(bucket, executables):
    check_in_place(make_plan(), executables.get(bucket))


@pytest.mark.parametrize("dtype, decode_steps, bucket", [
    ("float32", 4, Bucket(3, 0, 4)), ("bfloat16", 1, Bucket(0, 32)), ("bfloat16", 1, Bucket(3, 32))], ids=str)
def test_so_it_is_in_other_dtypes_and_with_several_decode_steps(dtype, decode_steps, bucket, xla_cache):
    plan = make_plan(dtype, decode_steps=decode_steps)
    check_in_place(plan, Executables(plan.lower, xla_cache).get(bucket))


def test_a_slot_is_uploaded_in_place(executables):
    plan = make_plan()
    memory = executables.get(ADMIT).memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(jax.eval_shape(plan.init_state).slots)
    assert memory.temp_size_in_bytes < 0.01 * plan.pool_bytes


# -- padding


def run(rig: Rig, state: Any, plan: StepPlan) -> tuple[StepResult, Any]:
    """One step from a state of numpy arrays to another."""
    rig.runner.state = jax.tree.map(jnp.asarray, state)
    return rig.runner.fetch(rig.runner.launch(plan)), jax.tree.map(np.array, rig.runner.state)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def poisoned(state: Any, config, used_pages: np.ndarray) -> Any:
    """NaN in every page that no sequence has, the dummy page included; the dummy slot's history is some other ids."""
    unused = np.setdiff1d(np.arange(config.num_pages), used_pages)
    pages = (unused[None, :] + np.arange(2)[:, None] * config.num_pages).reshape(-1)
    state = jax.tree.map(np.copy, state)
    for leaf in jax.tree.leaves(state.pool):
        leaf[pages] = np.nan
    state.slots.tokens[-1] = 55
    return state


@pytest.mark.parametrize("kind", ["decode", "mixed", "prefill"])
def test_padding_changes_nothing(rig: Rig, kind: str):
    """Two sequences in shapes that hold more. Whatever stands in unused pages and in the dummy slot, the results are
    the same bit by bit, and nothing is written but their own pages and ids."""
    runner, config = rig.runner, rig.runner.config
    first, second = rig.add(prompt(11), logprobs=3), rig.add(prompt(40), logprobs=3)
    runner.fetch(runner.launch(rig.plan(prefills=[rig.prefill(first, 0, 10 if kind == "prefill" else None)])))
    if kind == "decode":
        runner.fetch(runner.launch(rig.plan(prefills=[rig.prefill(second)])))
    plan = {"decode": rig.plan([rig.row(first, 11, 1, True), rig.row(second, 40, 1, True)]),
            "mixed": rig.plan([rig.row(first, 11, 1, True)], [rig.prefill(second, 0, 35)]),
            "prefill": rig.plan(prefills=[rig.prefill(first, 10)])}[kind]
    before = jax.tree.map(np.array, runner.state)
    used = rig.tables[:2][rig.tables[:2] > 0]

    result, after = run(rig, before, plan)
    other, dirty = run(rig, poisoned(before, config, used), plan)

    assert result.token_ids == other.token_ids and not result.failed and not other.failed
    for seq_id, rows in result.logprobs.items():
        for clean, poisoned_ in zip(columns(rows), columns(other.logprobs[seq_id])):
            np.testing.assert_array_equal(clean, poisoned_)
    # Of the state, only the pages and ids of these rows have changed, and to the same in both runs.
    touched = {int(rig.tables[row.slot, at // config.page_size]) for row in plan.rows
               for at in range(row.start, row.start + row.num_tokens)}
    pages = np.array(sorted(touched))[None, :] + np.arange(2)[:, None] * config.num_pages
    for old, new, new_dirty in zip(*(jax.tree.leaves(state.pool) for state in (before, after, dirty))):
        np.testing.assert_array_equal(bits(new[pages]), bits(new_dirty[pages]))
        rest = np.setdiff1d(np.arange(len(old)), [*pages.reshape(-1), 0, config.num_pages])
        np.testing.assert_array_equal(bits(new[rest]), bits(old[rest]))
    tokens = before.slots.tokens.copy()
    for row in plan.rows:
        if row.samples:
            tokens[row.slot, row.start + row.num_tokens] = result.token_ids[row.seq.seq_id][0]
    np.testing.assert_array_equal(after.slots.tokens[:-1], tokens[:-1])
    for name in ("ints", "floats", "end_ids", "bias_ids", "bias_values", "bad_words", "allowed"):
        np.testing.assert_array_equal(getattr(after.slots, name), getattr(before.slots, name))


def columns(rows: LogprobRows) -> list[np.ndarray]:
    return [rows.token_logprob, rows.token_rank, rows.top_ids, rows.top_logprobs]


def test_the_same_inputs_give_the_same_outputs(rig: Rig):
    seq = rig.add(prompt(20))
    plan = rig.plan(prefills=[rig.prefill(seq)])
    rig.runner.launch(plan)
    plan = rig.plan([rig.row(seq, 20, 1, True)])
    before = jax.tree.map(np.array, rig.runner.state)
    (first, state), (second, again) = run(rig, before, plan), run(rig, before, plan)
    assert first == second
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again)):
        np.testing.assert_array_equal(bits(a), bits(b))
