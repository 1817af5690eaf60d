"""The decoder computes what transformers computes, for every family and every kind of rope."""

import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve.models import registry
from jaxserve.models.decoder import decode_tokens, logits
from jaxserve.models.params import DecoderParams, abstract_params
from tests.models.checkpoints import random_params
from tests.models.dense_cache import dense_attend, empty_cache
from tests.models.golden_cases import CASES, DECODE_POSITIONS, PREFILL_POSITIONS, PROMPT_LEN, llama, prompt

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def goldens():
    with np.load(GOLDEN / "model_logits.npz") as file:
        return dict(file)


@cache
def model(name, dtype="float32"):
    case = CASES[name]
    spec = registry.resolve(case.config, case.max_model_len)
    return spec, jax.tree.map(jnp.asarray, random_params(case.config, spec, jnp.dtype(dtype)))


# Compiled with little optimisation: many programs run once here, on very little data.
@partial(jax.jit, static_argnums=(0,),
         compiler_options={"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0})
def step(spec, params, token_ids, positions, kv):
    hidden, kv = decode_tokens(spec, params, token_ids, positions, kv, dense_attend(spec, positions))
    return logits(spec, params, hidden), kv


def prefill(name, dtype="float32", change_params=lambda params: params):
    spec, params = model(name, dtype)
    got, _ = step(spec, change_params(params), prompt(CASES[name].config), jnp.arange(PROMPT_LEN),
                  empty_cache(spec, PROMPT_LEN, jnp.dtype(dtype)))
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


def bfloat16_as_bits(params: DecoderParams) -> DecoderParams:
    return dataclasses.replace(params, layers=jax.tree.map(
        lambda leaf: lax.bitcast_convert_type(leaf, jnp.uint16), params.layers))


@pytest.mark.parametrize("name", ["llama-heads-9-3-dim-64", "qwen3-heads-5-5-dim-128", "gemma2"])
def test_bfloat16_weights_stay_near_float32(name):
    got = prefill(name, "bfloat16")
    error = relative_error(got[list(PREFILL_POSITIONS)], goldens()[f"{name}/prefill"])
    assert 1e-4 < error < 0.03  # rounded, so not equal; and not wrong
    np.testing.assert_array_equal(prefill(name, "bfloat16", bfloat16_as_bits), got)


@pytest.mark.parametrize("dtype, change_params", [("float32", lambda params: params), ("bfloat16", bfloat16_as_bits)])
def test_a_step_on_cpu_copies_no_stacked_weights(dtype, change_params):
    spec = registry.resolve(llama(num_hidden_layers=16, hidden_size=128, intermediate_size=512), None)
    params = jax.eval_shape(change_params, abstract_params(spec, dtype))

    @jax.jit
    def run(params, ids):
        return decode_tokens(spec, params, ids, ids, (), lambda q, k, v, kv, layer, window: (q, kv))[0]

    compiled = run.lower(params, jax.ShapeDtypeStruct((4,), jnp.int32)).compile()
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params.layers))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * weights


def test_hidden_states_and_logits_are_float32_and_attend_gets_the_weights_dtype():
    spec, params = model("llama-biases", "bfloat16")
    seen = []

    def attend(q, k, v, kv, layer, window):
        seen.extend([q, k, v])
        return q, kv

    def run(positions):
        hidden, _ = decode_tokens(spec, params, positions, positions, (), attend)
        return hidden, logits(spec, params, hidden)

    hidden, scores = jax.eval_shape(run, jnp.arange(3))
    assert (hidden.shape, scores.shape) == ((3, 48), (3, 259))
    assert hidden.dtype == scores.dtype == jnp.float32
    assert [x.shape for x in seen] == [(3, 4, 12), (3, 2, 12), (3, 2, 12)]
    assert {x.dtype for x in seen} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name, windows", [
    ("mistral-window", [7, 7]), ("gemma2-layer-types", [1 << 30, 9, 1 << 30]), ("llama-biases", None)])
def test_attend_is_given_the_layer_its_window_and_any_pytree(name, windows):
    spec, params = model(name)

    def attend(q, k, v, kv, layer, window):
        assert layer.dtype == jnp.int32 and layer.shape == ()
        assert (window is None) == (windows is None)
        if window is not None:
            assert window.dtype == jnp.int32 and window.shape == ()
            kv = kv | {"windows": kv["windows"].at[layer].set(window)}
        return q, kv | {"calls": kv["calls"].at[layer].add(1)}

    @jax.jit
    def run(ids):
        zeros = jnp.zeros(spec.num_layers, jnp.int32)
        return decode_tokens(spec, params, ids, ids, {"windows": zeros, "calls": zeros}, attend)[1]

    kv = run(jnp.arange(2))
    np.testing.assert_array_equal(kv["calls"], [1] * spec.num_layers)
    np.testing.assert_array_equal(kv["windows"], windows or [0] * spec.num_layers)
