"""The decoder computes what transformers computes, for every family and every kind of rope."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import registry
from jaxserve.models.assemble import assemble
from jaxserve.models.decoder import decode_tokens, logits
from tests.models.checkpoints import random_checkpoint
from tests.models.dense_cache import dense_attend, empty_cache
from tests.models.golden_cases import CASES, DECODE_POSITIONS, PREFILL_POSITIONS, PROMPT_LEN, prompt

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def goldens():
    with np.load(GOLDEN / "model_logits.npz") as file:
        return dict(file)


@cache
def model(name, dtype="float32"):
    case = CASES[name]
    spec = registry.resolve(case.config, case.max_model_len)
    names = registry.name_map(case.config, spec)
    return spec, jax.tree.map(jnp.asarray, assemble(spec, names, random_checkpoint(case.config), jnp.dtype(dtype)))


@partial(jax.jit, static_argnums=(0,), static_argnames=("unroll",))
def step(spec, params, token_ids, positions, kv, unroll=False):
    hidden, kv = decode_tokens(spec, params, token_ids, positions, kv, dense_attend(spec, positions), unroll=unroll)
    return logits(spec, params, hidden), kv


def prefill(name, dtype="float32", unroll=False):
    spec, params = model(name, dtype)
    got, _ = step(spec, params, prompt(CASES[name].config), jnp.arange(PROMPT_LEN),
                  empty_cache(spec, PROMPT_LEN, jnp.dtype(dtype)), unroll=unroll)
    return np.asarray(got)


def relative_error(got, want):
    assert got.shape == want.shape and got.dtype == np.float32
    return np.abs(got - want).max() / (want.max() - want.min())


@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_transformers(name):
    assert relative_error(prefill(name)[list(PREFILL_POSITIONS)], goldens()[f"{name}/prefill"]) <= 1e-4


@pytest.mark.parametrize("name", CASES)
def test_token_by_token_decode_equals_transformers(name):
    spec, params = model(name)
    kv = empty_cache(spec, PROMPT_LEN)
    rows = []
    for position, token in enumerate(prompt(CASES[name].config)):
        row, kv = step(spec, params, token[None], jnp.array([position]), kv)
        rows.append(np.asarray(row[0]))
    assert relative_error(np.stack(rows)[list(DECODE_POSITIONS)], goldens()[f"{name}/decode"]) <= 1e-4


# One with windows and layers without rope, one with everything that Gemma adds.
@pytest.mark.parametrize("name", ["smollm3-window-biases", "gemma2"])
def test_unrolled_layers_compute_the_same_as_the_scan(name):
    np.testing.assert_allclose(prefill(name, unroll=True), prefill(name), atol=1e-5)


@pytest.mark.parametrize("name", ["llama-heads-9-3-dim-64", "qwen3-heads-5-5-dim-128", "gemma2"])
@pytest.mark.parametrize("unroll", [False, True])
def test_bfloat16_weights_stay_near_float32(name, unroll):
    got = prefill(name, "bfloat16", unroll)[list(PREFILL_POSITIONS)]
    error = relative_error(got, goldens()[f"{name}/prefill"])
    assert 1e-4 < error < 0.03  # rounded, so not equal; and not wrong


def test_hidden_states_and_logits_are_float32_and_kv_carries_the_weights_dtype():
    spec, params = model("llama-biases", "bfloat16")
    positions = jnp.arange(3)
    seen = []

    def attend(q, k, v, kv, layer, window):
        seen.extend([q, k, v])
        assert window is None and layer.dtype == jnp.int32
        return q, kv

    hidden, _ = decode_tokens(spec, params, positions, positions, (), attend)
    assert hidden.dtype == logits(spec, params, hidden).dtype == jnp.float32
    assert [x.shape for x in seen] == [(3, 4, 12), (3, 2, 12), (3, 2, 12)]
    assert {x.dtype for x in seen} == {jnp.dtype("bfloat16")}


def test_kv_may_be_any_pytree():
    spec, params = model("llama-biases")

    def attend(q, k, v, kv, layer, window):
        return q, {"layers seen": kv["layers seen"] + jnp.stack([1, layer])}

    _, kv = decode_tokens(spec, params, jnp.arange(3), jnp.arange(3), {"layers seen": jnp.zeros(2, jnp.int32)}, attend)
    np.testing.assert_array_equal(kv["layers seen"], [2, 0 + 1])


@pytest.mark.parametrize("name, windows", [
    ("mistral-window", [7, 7]), ("gemma2-layer-types", [1 << 30, 9, 1 << 30]), ("llama-biases", None)])
@pytest.mark.parametrize("unroll", [False, True])
def test_attend_is_given_each_layers_window(name, windows, unroll):
    spec, params = model(name)

    def attend(q, k, v, kv, layer, window):
        if windows is None:
            assert window is None
            return q, kv
        assert window.dtype == jnp.int32 and window.shape == ()
        return q, kv.at[layer].set(window)

    _, seen = decode_tokens(spec, params, jnp.arange(2), jnp.arange(2), jnp.zeros(spec.num_layers, jnp.int32), attend,
                            unroll=unroll)
    if windows is not None:
        np.testing.assert_array_equal(seen, windows)
