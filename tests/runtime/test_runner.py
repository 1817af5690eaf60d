from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.request import StepPlan
from jaxserve.engine.results import Fault
from jaxserve.errors import ConfigError
from jaxserve.models.decoder import decode_tokens, logits
from jaxserve.runtime import planning
from jaxserve.runtime.executables import compilations
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.step import StepOutput
from jaxserve.sampling.logprobs import empty_logprobs
from kernels_pallas._compat import single_device_sharding
from tests.models.dense_cache import dense_attend, empty_cache
from tests.runtime.rig import SPEC, VALID_VOCAB, Rig, make_params, make_plan, make_runner, prompt

LENGTH = 80  # of the reference's window


@cache
def _dense_logits(seed: int):
    params = make_params(seed=seed)

    def run(ids: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH)
        hidden, _ = decode_tokens(SPEC, params, ids, positions, empty_cache(SPEC, LENGTH),
                                  dense_attend(SPEC, positions))
        return logits(SPEC, params, hidden)[:, :VALID_VOCAB]

    return jax.jit(run)


def dense_logprobs(ids: list[int], seed: int = 0) -> np.ndarray:
    """log p(next) at every position, without pages, batches or steps: [len(ids), V]."""
    padded = np.zeros(LENGTH, np.int32)
    padded[:len(ids)] = ids
    return np.asarray(jax.nn.log_softmax(_dense_logits(seed)(padded), axis=-1))[:len(ids)]


def greedy(ids: list[int], count: int, seed: int = 0) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(dense_logprobs(ids, seed)[-1].argmax()))
    return ids[-count:]


# -- steps


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 64])
def test_one_sequence(rig: Rig, length: int):
    assert rig.generate(rig.add(prompt(length)), 12) == greedy(prompt(length), 12)


def test_a_prompt_in_chunks(rig: Rig):
    """Chunks of any length; only the last one gives an id."""
    seq = rig.add(prompt(60))
    for start, end in ((0, 5), (5, 40), (40, 59)):
        result = rig.runner.fetch(rig.runner.launch(rig.plan(prefills=[rig.prefill(seq, start, end)])))
        assert result.token_ids == {}
    result = rig.runner.fetch(rig.runner.launch(rig.plan(prefills=[rig.prefill(seq, 59)])))
    assert result.token_ids == {seq.seq_id: greedy(prompt(60), 1)}


def test_decode_rows_and_prefill_chunks_in_one_step(rig: Rig):
    a, b, c = (rig.add(prompt(length, seed=length)) for length in (9, 20, 12))
    launch, fetch = rig.runner.launch, rig.runner.fetch
    steps = [launch(rig.plan(prefills=[rig.prefill(a)])),
             launch(rig.plan([rig.row(a, 9, 1, True)], [rig.prefill(b), rig.prefill(c, 0, 11)])),
             launch(rig.plan([rig.row(a, 10, 1, True), rig.row(b, 20, 1, True)], [rig.prefill(c, 11)])),
             launch(rig.plan([rig.row(s, at, 1, True) for s, at in ((c, 12), (a, 11), (b, 21))]))]
    ids: dict[int, list[int]] = {a.seq_id: [], b.seq_id: [], c.seq_id: []}
    for launched in steps:
        for seq_id, new in fetch(launched).token_ids.items():
            ids[seq_id] += new
    for seq, count in ((a, 4), (b, 3), (c, 2)):
        assert ids[seq.seq_id] == greedy(seq.token_ids, count), seq.seq_id


def test_a_slot_that_is_used_again_forgets(rig: Rig):
    first = rig.add(prompt(30), repetition_penalty=5.0, logit_bias=((3, 100.0),), bad_words=((1, 2),),
                    allowed_token_ids=(3, 4))
    assert set(rig.generate(first, 3)) <= {3, 4}
    second = rig.add(prompt(5, seed=2))
    second.slot = first.slot
    rig.tables[first.slot] = rig.tables[1]
    assert rig.generate(second, 5) == greedy(prompt(5, seed=2), 5)


def test_results_are_for_those_who_asked(rig: Rig):
    """log p of sampled ids, of the prompt's, both, or none, in one batch."""
    asks = {"neither": {}, "sampled": {"logprobs": 2}, "prompt": {"prompt_logprobs": 0}}
    seqs = {name: rig.add(prompt(20, seed=i), **options) for i, (name, options) in enumerate(asks.items())}
    chunks = [rig.prefill(seqs["neither"]), rig.prefill(seqs["prompt"], 0, 15)]
    first = rig.runner.fetch(rig.runner.launch(rig.plan(prefills=chunks)))
    chunks = [rig.prefill(seqs["sampled"]), rig.prefill(seqs["prompt"], 15)]
    second = rig.runner.fetch(rig.runner.launch(rig.plan(prefills=chunks)))

    assert first.logprobs == {}
    assert second.logprobs.keys() == {seqs["sampled"].seq_id}
    rows = second.logprobs[seqs["sampled"].seq_id]
    wanted = dense_logprobs(seqs["sampled"].token_ids)[-1]
    np.testing.assert_allclose(rows.token_logprob, [wanted.max()], rtol=1e-4)
    np.testing.assert_array_equal(rows.top_ids[0], np.argsort(-wanted)[:3])
    np.testing.assert_allclose(rows.top_logprobs[0], np.sort(wanted)[::-1][:3], rtol=1e-4)
    assert rows.token_rank.tolist() == [1]

    seq = seqs["prompt"]
    assert first.prompt_logprobs.keys() == second.prompt_logprobs.keys() == {seq.seq_id}
    parts = [first.prompt_logprobs[seq.seq_id], second.prompt_logprobs[seq.seq_id]]
    assert [(start, len(rows.token_logprob)) for start, rows in parts] == [(0, 15), (15, 4)]
    wanted = dense_logprobs(seq.token_ids)[np.arange(19), seq.token_ids[1:]]
    np.testing.assert_allclose(np.concatenate([rows.token_logprob for _, rows in parts]), wanted, rtol=1e-4)


def test_a_row_that_is_not_finite_fails_alone(rig: Rig):
    good, bad = rig.add(prompt(10), logprobs=1), rig.add(prompt(12), logprobs=1)
    rig.runner.launch(rig.plan(prefills=[rig.prefill(good), rig.prefill(bad)]))
    state, config = rig.runner.state, rig.runner.config
    pages = np.concatenate([rig.tables[bad.slot, :1] + layer * config.num_pages for layer in range(2)])
    rig.runner.state = state.replace(pool=jax.tree.map(lambda leaf: leaf.at[pages].set(np.nan), state.pool))
    rows = [rig.row(good, 10, 1, True), rig.row(bad, 12, 1, True)]
    result = rig.runner.fetch(rig.runner.launch(rig.plan(rows)))
    assert result.failed == {bad.seq_id: Fault.NOT_FINITE} and result.token_ids[bad.seq_id] == []
    assert result.token_ids[good.seq_id] == greedy(prompt(10), 2)[1:]


# -- engines of other kinds


def test_several_decode_steps_in_a_launch(xla_cache):
    """Each row goes as far as it was planned to; log-probabilities come for each id."""
    runner = make_runner(make_plan(decode_steps=4), make_params(), xla_cache)
    rig = Rig(runner)
    a, b = rig.add(prompt(6), logprobs=0), rig.add(prompt(9))
    first = runner.fetch(runner.launch(rig.plan(prefills=[rig.prefill(a), rig.prefill(b)])))
    second = runner.fetch(runner.launch(rig.plan([rig.row(a, 6, 4, True), rig.row(b, 9, 2, True)])))
    third = runner.fetch(runner.launch(rig.plan([rig.row(b, 11, 1, True), rig.row(a, 10, 3, True)])))
    for seq, counts in ((a, [1, 4, 3]), (b, [1, 2, 1])):
        parts = [result.token_ids[seq.seq_id] for result in (first, second, third)]
        assert [len(part) for part in parts] == counts
        assert sum(parts, []) == greedy(seq.token_ids, sum(counts))
    assert second.logprobs[a.seq_id].token_logprob.shape == (4,)
    assert second.logprobs[a.seq_id].token_rank.tolist() == [1, 1, 1, 1]
    # Only as many rounds run as the longest row asks for.
    assert runner.metrics()["token_rows"] == 15 + 6 + 4
    assert runner.metrics()["token_rows_padded"] == 64 + 3 * 4 + 3 * 3


def test_deterministic_launches_each_kind_in_its_one_shape(xla_cache):
    runner = make_runner(make_plan(deterministic=True), make_params(), xla_cache)
    rig = Rig(runner)
    a, b = rig.add(prompt(6)), rig.add(prompt(9))
    runner.launch(rig.plan(prefills=[rig.prefill(a)]))
    both = runner.launch(rig.plan([rig.row(a, 6, 1, True)], [rig.prefill(b)]))
    assert [launch.bucket for launch in both.launches] == list(runner.plan.buckets)
    result = runner.fetch(both)
    assert result.token_ids == {a.seq_id: greedy(prompt(6), 2)[1:], b.seq_id: greedy(prompt(9), 1)}
    assert runner.metrics()["executables"] == 3


def test_weights_as_bits_are_the_same_weights(monkeypatch, xla_cache):
    """bfloat16 on jax 0.10's CPU: uint16 in the step, bfloat16 to everybody else, in one memory."""
    params, results = make_params("bfloat16"), []
    for as_bits in (False, True):
        monkeypatch.setattr(planning, "CPU_SCAN_WIDENS_BFLOAT16", as_bits)
        runner = make_runner(make_plan("bfloat16"), params, xla_cache)
        rig = Rig(runner)
        seq = rig.add(prompt(30), logprobs=3)
        result = runner.fetch(runner.launch(rig.plan(prefills=[rig.prefill(seq)])))
        results.append((result.token_ids, result.logprobs[seq.seq_id].top_logprobs))
        back = runner.params
        for mine, given in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
            assert mine.dtype == jnp.bfloat16
            assert mine.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()
        runner.update_params(make_params("bfloat16", seed=1))
        assert runner.params.layers.wqkv.dtype == jnp.bfloat16
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], atol=0.02)


# -- overlap


class FakeExecutables:
    """Every program returns at once, with outputs that tell when somebody waits for them."""

    def __init__(self):
        self.waits: list[str] = []

    cache = staticmethod(contextlib.nullcontext)

    def telling(self, what: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(block_until_ready=lambda: self.waits.append(what))

    def get(self, program):
        def run(weights_or_slots, state, *_):
            if program == "admit":
                return self.telling("slots")
            ids = types.SimpleNamespace(copy_to_host_async=lambda: self.waits.append("copy"))
            state = state.replace(pool=self.telling("pool"), slots=self.telling("step"))
            return state, StepOutput(token_ids=ids, logprobs=empty_logprobs(1, 1), prompt_logprobs=None)
        return run


@pytest.mark.parametrize("platform, waits", [
    ("cpu", ["slots", "copy", "pool", "step", "copy", "pool", "slots", "copy"]), ("gpu", ["copy"] * 3),
    ("tpu", ["copy"] * 3)])
def test_only_on_cpus_a_step_waits_for_its_state(monkeypatch, platform, waits):
    """Which the step before or the upload of a slot makes."""
    plan = make_plan()
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr("jaxserve.runtime.runner.single_device_sharding", lambda _: single_device_sharding(plan.device))
    executables = FakeExecutables()
    runner = Runner(dataclasses.replace(plan, device=device), make_params(), executables)  # type: ignore[arg-type]
    rig = Rig(runner)
    seq = rig.add([1, 2, 3])
    runner.launch(rig.plan([rig.row(seq, 3, 1, True)]))
    runner.launch(rig.plan([rig.row(seq, 4, 1, True)]))
    rig.add([4, 5])
    runner.launch(rig.plan([rig.row(seq, 5, 1, True)]))
    assert executables.waits == waits


def test_fetching_late_and_at_once_are_the_same(rig: Rig):
    seq = rig.add(prompt(5))
    late = rig.generate(seq, 6)
    runner = rig.runner
    runner.reset_state()
    rig = Rig(runner)
    seq = rig.add(prompt(5))
    ids = runner.fetch(runner.launch(rig.plan(prefills=[rig.prefill(seq)]))).token_ids[seq.seq_id]
    for at in range(5, 10):
        ids += runner.fetch(runner.launch(rig.plan([rig.row(seq, at, 1, True)]))).token_ids[seq.seq_id]
    assert ids == late


# -- state


def test_a_reset_needs_no_compilation_and_frees_the_old_state(rig: Rig):
    old = jax.tree.leaves(rig.runner.state)
    before = compilations()
    rig.runner.reset_state()
    assert compilations() == before
    assert all(leaf.is_deleted() for leaf in old)
    assert rig.generate(rig.add(prompt(5)), 3) == greedy(prompt(5), 3)


def test_a_launch_that_fails_can_be_recovered_from(rig: Rig):
    seq = rig.add(prompt(5))
    rig.runner.launch(rig.plan(prefills=[rig.prefill(seq)]))
    broken = StepPlan(decodes=(rig.row(seq, 5, 1, True),), block_tables=np.zeros((4, 99), np.int32))
    with pytest.raises(TypeError):
        rig.runner.launch(broken)
    rig.runner.reset_state()
    again = Rig(rig.runner)
    assert again.generate(again.add(prompt(5)), 3) == greedy(prompt(5), 3)


def test_metrics_count(rig: Rig):
    before = rig.runner.metrics()
    rig.generate(rig.add(prompt(40)), 3)
    after = rig.runner.metrics()
    assert after["steps"] - before["steps"] == 3
    assert after["token_rows"] - before["token_rows"] == 42
    assert after["token_rows_padded"] - before["token_rows_padded"] == 64 + 1 + 1
    assert after["executables"] == 7 and set(after["compile_seconds"]) == {
        "admit", *map(str, rig.runner.plan.buckets)}
    assert after["kv_pool_bytes"] == rig.runner.plan.pool_bytes


def test_compilations_count_from_the_warm_up(xla_cache):
    runner = make_runner(make_plan(), make_params(), xla_cache)
    assert runner.metrics()["compilations_after_warmup"] is None
    runner.mark_warm()
    assert runner.metrics()["compilations_after_warmup"] == 0
    jax.jit(lambda x: x * 54321)(np.ones(3))
    assert runner.metrics()["compilations_after_warmup"] == 1


def test_close_gives_everything_back(xla_cache):
    gc.collect()
    before = len(jax.live_arrays())
    params = make_params()
    runner = make_runner(make_plan(), params, xla_cache)
    rig = Rig(runner)
    rig.generate(rig.add(prompt(5)), 2)
    state = jax.tree.leaves(runner.state)
    runner.close()
    assert all(leaf.is_deleted() for leaf in state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))  # those may be somebody else's
    del params, state
    gc.collect()
    assert len(jax.live_arrays()) == before


# -- new weights


def test_a_step_donates_the_state_but_never_the_weights():
    """They may be a user's own arrays."""
    plan = make_plan()
    for bucket in plan.buckets:
        weights, state, batch = plan.lower(bucket).args_info[0]
        assert not any(leaf.donated for leaf in jax.tree.leaves((weights, batch)))
        assert all(leaf.donated for leaf in jax.tree.leaves(state))


def test_new_weights_are_used_and_nothing_is_compiled(rig: Rig):
    new, old = make_params(seed=1), make_params()
    before = compilations()
    try:
        rig.runner.update_params(new)
        ids = rig.generate(rig.add(prompt(20)), 4)
        assert compilations() == before
    finally:
        rig.runner.update_params(old)
    assert ids == greedy(prompt(20), 4, seed=1) != greedy(prompt(20), 4)


def test_new_weights_on_the_host_are_put_on_the_device(rig: Rig):
    rig.runner.update_params(jax.tree.map(np.asarray, make_params()))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rig.runner.params))


def elsewhere(leaf: jax.Array) -> jax.Array:
    """In another kind of memory."""
    return jax.device_put(leaf, single_device_sharding(jax.devices()[0], memory_kind="pinned_host"))


@pytest.mark.parametrize("change, message", [
    (lambda p: dataclasses.replace(p, lm_head=p.embed), r"it has an unknown \.lm_head"),
    (lambda p: dataclasses.replace(p, final_norm=None), r"it lacks \.final_norm"),
    (lambda p: dataclasses.replace(p, embed=p.embed[:-1]), r"\.embed has shape \(96, 32\), given \(95, 32\)"),
    (lambda p: dataclasses.replace(p, final_norm=p.final_norm.astype(jnp.bfloat16)),
     r"\.final_norm has dtype float32, given bfloat16"),
    (lambda p: dataclasses.replace(p, layers=dataclasses.replace(p.layers, wo=elsewhere(p.layers.wo))),
     r"\.layers\.wo is sharded as"),
])
def test_new_weights_that_do_not_fit_are_refused(rig: Rig, change, message):
    kept = jax.tree.leaves(rig.runner.params)
    with pytest.raises(ConfigError, match="update_params: .*" + message):
        rig.runner.update_params(change(make_params(seed=1)))
    assert all(a is b for a, b in zip(jax.tree.leaves(rig.runner.params), kept, strict=True))
