"""Parameters from arrays in memory: a DecoderParams, arrays by name, Flax nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.registry import name_map, resolve
from jaxserve.weights.arrays import params_from_arrays
from kernels_pallas._compat import single_device_sharding
from tests.models.checkpoints import random_checkpoint
from tests.weights.tiny import LLAMA

SPEC = resolve(LLAMA, None)
NAMES = name_map(LLAMA, SPEC)


def convert(params, nnx_names=None, dtype="float32", shardings=None):
    return params_from_arrays(params, SPEC, NAMES, nnx_names, dtype, shardings)


@pytest.fixture(scope="module")
def expected():
    return convert(random_checkpoint(LLAMA))


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_arrays_by_hugging_face_name_of_any_kind(expected):
    assert_same(convert({name: jnp.asarray(t) for name, t in random_checkpoint(LLAMA).items()}), expected)
    assert convert(random_checkpoint(LLAMA), dtype="bfloat16").embed.dtype == jnp.bfloat16


def test_a_pytree_is_used_as_it_is(expected):
    sharding = single_device_sharding(jax.devices()[0])
    same = convert(expected, shardings=sharding)
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(expected)))
    on_host = jax.tree.map(np.asarray, expected)
    assert_same(convert(on_host), expected)
    assert isinstance(convert(on_host).embed, jax.Array)


def test_a_pytree_of_another_dtype(expected):
    with pytest.raises(ConfigError, match="embed is float32, the engine's weights are bfloat16"):
        convert(expected, dtype="bfloat16")


def test_a_pytree_of_another_shape_or_structure(expected):
    wrong = expected.replace(embed=expected.embed[:5], lm_head=None,
                             layers=expected.layers.replace(bo=jnp.zeros((2, 64))))
    with pytest.raises(CheckpointError) as error:
        convert(wrong)
    assert "lm_head is missing" in str(error.value) and "layers.bo is unknown" in str(error.value)
    assert "embed is [5, 64], must be [70, 64]" in str(error.value)


@pytest.mark.parametrize("params", [3, [1, 2], {"a": 1}])
def test_other_things_are_refused(params):
    with pytest.raises(ConfigError, match="it must be a DecoderParams, a mapping"):
        convert(params)


def test_missing_arrays_are_listed():
    tensors = random_checkpoint(LLAMA)
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="1 missing: model.norm.weight"):
        convert(tensors)


class Block(nnx.Module):
    def __init__(self, tensors, layer):
        def kernel(name):  # flax has kernels [in, out]
            return nnx.Param(jnp.asarray(tensors[f"model.layers.{layer}.{name}.weight"].T))

        self.q, self.k, self.v, self.o = (kernel(f"self_attn.{c}_proj") for c in "qkvo")
        self.gate, self.up, self.down = (kernel(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        self.norm1 = nnx.Param(jnp.asarray(tensors[f"model.layers.{layer}.input_layernorm.weight"]))
        self.norm2 = nnx.Param(jnp.asarray(tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]))


class Model(nnx.Module):
    def __init__(self, tensors):
        self.embed = nnx.Param(jnp.asarray(tensors["model.embed_tokens.weight"]))
        self.head = nnx.Param(jnp.asarray(tensors["lm_head.weight"].T))
        self.norm = nnx.Param(jnp.asarray(tensors["model.norm.weight"]))
        self.blocks = nnx.List([Block(tensors, layer) for layer in range(SPEC.num_layers)])
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))  # has state that is no parameter


def nnx_names():
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight",
             "head": ("lm_head.weight", lambda kernel: kernel.T)}
    for i in range(SPEC.num_layers):
        hf = f"model.layers.{i}"
        names |= {f"blocks.{i}.norm1": f"{hf}.input_layernorm.weight",
                  f"blocks.{i}.norm2": f"{hf}.post_attention_layernorm.weight"}
        names |= {f"blocks.{i}.{c}": (f"{hf}.self_attn.{c}_proj.weight", np.transpose) for c in "qkvo"}
        names |= {f"blocks.{i}.{c}": (f"{hf}.mlp.{c}_proj.weight", np.transpose) for c in ("gate", "up", "down")}
    return names


def test_nnx_module_and_state(expected):
    module = Model(random_checkpoint(LLAMA))
    assert_same(convert(module, nnx_names()), expected)
    assert_same(convert(nnx.state(module), nnx_names()), expected)
    assert_same(convert(nnx.state(module, nnx.Param), nnx_names()), expected)


def test_nnx_names_that_do_not_fit():
    names = nnx_names()
    del names["blocks.0.q"]
    names["blocks.9.q"] = "x"
    with pytest.raises(CheckpointError, match="not in the module: blocks.9.q; not in name_map: blocks.0.q"):
        convert(Model(random_checkpoint(LLAMA)), names)


def test_name_map_is_for_nnx_only(expected):
    with pytest.raises(ConfigError, match="a DecoderParams needs none"):
        convert(expected, nnx_names())
    with pytest.raises(ConfigError, match="for an nnx module or state, but params is a dict"):
        convert({}, nnx_names())
