"""Rope: frequencies as transformers has them, whatever the spelling; the rotation is a rotation."""

import dataclasses
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxserve.layers.rope import apply_rope, cos_sin
from jaxserve.models import registry
from jaxserve.models.rope_config import resolve_rope
from tests.models.golden_cases import ROPE_CASES, llama, mistral, phi3, smollm3

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def goldens():
    with np.load(GOLDEN / "rope.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ROPE_CASES)
def test_frequencies_equal_transformers(name):
    config, length = ROPE_CASES[name]
    rope = resolve_rope(config, head_dim=64, max_model_len=length)
    np.testing.assert_allclose(rope.inv_freq, goldens()[f"{name}/inv_freq"], rtol=1e-6)
    assert rope.attention_factor == pytest.approx(float(goldens()[f"{name}/attention_factor"]), rel=1e-9)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind, values", [
    ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("dynamic", {"factor": 4.0})])
def test_every_spelling_of_a_config_means_the_same_model(kind, values):
    old, newer = llama(rope_scaling={"type": kind, **values}), llama(rope_scaling={"rope_type": kind, **values})
    newest = llama(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **values})
    del newest["rope_theta"]
    assert registry.resolve(old, None) == registry.resolve(newer, None) == registry.resolve(newest, None)


def test_theta_comes_from_rope_parameters_then_the_config_then_the_family():
    def theta(config):  # the second frequency of head_dim 12 is theta^(-2/12)
        return round(registry.resolve(config, None).rope.inv_freq[1] ** -6)

    nested = {"rope_type": "default", "rope_theta": 500.0}
    assert theta(llama(rope_theta=300.0, rope_parameters=nested)) == 500
    assert theta(llama(rope_theta=300.0)) == 300
    for config, default in ((llama(), 10_000), (smollm3(), 2_000_000)):
        del config["rope_theta"]
        assert theta(config) == pytest.approx(default, rel=1e-4)


@pytest.mark.parametrize("scaling", [{"rope_type": "spiral", "factor": 2.0}, {"type": "mrope"},
                                     {"rope_type": "proportional"}])
def test_unknown_rope_types_are_refused_by_name(scaling):
    with pytest.raises(UnsupportedModelError, match="not supported; supported: default, linear, dynamic"):
        registry.resolve(llama(rope_scaling=scaling), None)


def test_rope_that_differs_by_layer_type_is_refused():
    with pytest.raises(UnsupportedModelError, match="differ by layer type"):
        registry.resolve(llama(rope_parameters={"full_attention": {"rope_type": "default"}}), None)


def test_dynamic_scaling_is_refused_beyond_the_length_at_which_it_starts():
    config = llama(rope_scaling={"type": "dynamic", "factor": 2.0})  # max_position_embeddings is 64
    plain = registry.resolve(llama(), 64).rope
    assert registry.resolve(config, 64).rope == dataclasses.replace(plain, max_len=64)
    with pytest.raises(ConfigError, match="max_model_len=65 is longer than 64"):
        registry.resolve(config, 65)


def test_longrope_takes_the_long_factors_if_any_sequence_may_exceed_the_original_length():
    config = phi3(hidden_size=48, original_max_position_embeddings=32, rope_scaling={
        "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6})
    plain = registry.resolve(phi3(hidden_size=48), 32).rope.inv_freq
    short, long = (registry.resolve(config, length).rope for length in (32, 33))
    np.testing.assert_allclose(short.inv_freq, plain)
    np.testing.assert_allclose(np.multiply(long.inv_freq, 4.0), plain)
    assert (short.max_len, long.max_len) == (32, None)
    assert registry.resolve(config, None).rope == long  # the model's own limit is 64


@pytest.mark.parametrize("alias", ["su", "yarn"])
def test_phi3_knows_the_old_names_of_longrope(alias):
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    old, new = (phi3(rope_scaling={"type": kind, **factors}) for kind in (alias, "longrope"))
    assert registry.resolve(old, None) == registry.resolve(new, None)


@pytest.mark.parametrize("scaling, message", [
    ({"type": "linear"}, "factor is missing"),
    ({"type": "linear", "factor": "two"}, "factor must be a positive number, got 'two'"),
    ({"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "must be greater than low_freq_factor"),
    ({"type": "longrope", "short_factor": [1.0]}, "long_factor of longrope must be a list of 6"),
    ({"type": "longrope", "long_factor": [1.0] * 5}, "long_factor of longrope must be a list of 6"),
    ("linear", "rope_scaling must be an object, got 'linear'"),
])
def test_malformed_rope_entries_are_named(scaling, message):
    with pytest.raises(CheckpointError, match=message):
        registry.resolve(llama(rope_scaling=scaling, original_max_position_embeddings=16), None)


def test_partial_rotary_is_refused_where_transformers_has_none():
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        registry.resolve(mistral(partial_rotary_factor=0.5), None)


def test_a_share_of_the_head_that_is_not_rotated_passes_through():
    x = np.random.default_rng(0).standard_normal((5, 3, 10), np.float32)
    cos, sin = cos_sin((1.0, 0.1, 0.01), 1.0, jnp.arange(5))
    rotated = np.asarray(apply_rope(x, cos, sin))
    np.testing.assert_array_equal(rotated[..., 6:], x[..., 6:])
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(rotated[0], x[0])  # position 0


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 8)).astype(np.float32)

    def score(q_position, k_position):
        rotate = [apply_rope(x, *cos_sin((1.0, 0.3, 0.1, 0.03), 1.0, jnp.array([p])))
                  for x, p in ((q, q_position), (k, k_position))]
        return float(jnp.vdot(*rotate))

    assert score(107, 100) == pytest.approx(score(7, 0), rel=1e-3)


def test_rotation_is_accurate_at_long_positions():
    inv_freq = tuple((500000.0 ** -(np.arange(32) / 32)).astype(np.float32).tolist())
    positions = np.array([0, 1, 4095, 131071], np.int32)
    cos, sin = cos_sin(inv_freq, 1.0, jnp.asarray(positions))
    angles = (positions.astype(np.float32)[:, None] * np.asarray(inv_freq, np.float32)).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
