"""Tensors into the parameter pytree: values, dtypes, shards, memory discipline and the report of defects."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from operator import attrgetter

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import ignorable, name_map, resolve
from jaxserve.weights.arrays import params_from_arrays
from jaxserve.weights.lazy import LazyTensor
from jaxserve.weights.load import load_params
from kernels_pallas._compat import single_device_sharding
from tests.models.checkpoints import random_checkpoint
from tests.weights.tiny import FAMILIES, LLAMA


def lazy(tensors):
    return {name: LazyTensor(t.shape, t.dtype, lambda t=t: t) for name, t in tensors.items()}


def load(config, tensors, dtype="float32", **kwargs):
    spec = resolve(config, None)
    return load_params(spec, name_map(config, spec), lazy(tensors), dtype, ignorable=ignorable, **kwargs)


def assembled(config, tensors, dtype):
    """What the name map says, done the plain way: the whole tree on the host, tensor by tensor."""
    spec = resolve(config, None)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), abstract_params(spec, dtype))
    for name, places in name_map(config, spec).items():
        for place in places:
            attrgetter(place.leaf)(params)[place.index] = place.to_leaf(tensors[name])
    assert not any(np.isnan(leaf.astype(np.float32)).any() for leaf in jax.tree.leaves(params))
    return params


def assert_params_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_loads_to_what_the_name_map_says(family, dtype):
    config = FAMILIES[family]
    tensors = random_checkpoint(config)
    params = load(config, tensors, dtype)
    assert_params_equal(params, assembled(config, tensors, dtype))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_each_tensor_is_read_once_and_only_if_needed():
    reads: list[str] = []
    arrays = random_checkpoint(LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8)}
    tensors = {name: LazyTensor(t.shape, t.dtype, lambda name=name, t=t: reads.append(name) or t)
               for name, t in arrays.items()}
    spec = resolve(LLAMA, None)
    names = name_map(LLAMA, spec)
    load_params(spec, names, tensors, "float32", ignorable=ignorable)
    assert sorted(reads) == sorted(names)


def test_all_problems_are_reported_at_once():
    tensors = random_checkpoint(LLAMA)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.lora"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = np.zeros((70, 63), np.float32)
    with pytest.raises(CheckpointError) as error:
        load(LLAMA, tensors)
    message = str(error.value)
    assert "2 missing: " in message and "model.norm.weight" in message and "layers.1.mlp.up_proj.weight" in message
    assert "1 unknown: model.layers.0.self_attn.q_proj.lora" in message
    assert "1 of the wrong shape: lm_head.weight is [70, 63], must be [70, 64]" in message


def test_long_lists_of_problems_are_cut():
    with pytest.raises(CheckpointError, match=r"21 missing: .* \.\.\."):
        load(LLAMA, {})


def test_quantised_tensors_are_refused_by_name():
    tensors = random_checkpoint(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match=f"{name} is float8_e4m3fn; weights must be"):
        load(LLAMA, tensors)


def test_values_beyond_float16_are_an_error_not_infinity():
    tensors = random_checkpoint(LLAMA)
    tensors["model.norm.weight"][3] = 1e6
    with pytest.raises(CheckpointError, match="model.norm.weight has values that float16 cannot hold"):
        load(LLAMA, tensors, "float16")


def test_progress_ends_at_the_total():
    seen: list[tuple[int, int]] = []
    params = load(LLAMA, random_checkpoint(LLAMA), progress=lambda done, total: seen.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_on_cpu_the_host_buffer_becomes_the_array(monkeypatch):
    from jaxserve.weights import load as load_module

    buffers = []
    make = load_module._aligned_empty
    monkeypatch.setattr(load_module, "_aligned_empty", lambda *a: buffers.append(make(*a)) or buffers[-1])
    params = load(LLAMA, random_checkpoint(LLAMA))
    assert {b.ctypes.data for b in buffers} == {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}


def test_one_sharding_for_all_leaves():
    sharding = single_device_sharding(jax.devices()[0])
    tensors = random_checkpoint(LLAMA)
    params = load(LLAMA, tensors, shardings=sharding)
    assert_params_equal(params, load(LLAMA, tensors))
    assert params.layers.wqkv.sharding == sharding


def test_a_format_is_how_the_array_lies():
    device = single_device_sharding(jax.devices()[0])
    spec = resolve(LLAMA, None)
    formats = jax.tree.map(lambda leaf: device, abstract_params(spec, "float32"))
    formats = dataclasses.replace(formats, layers=dataclasses.replace(
        formats.layers, w_gate_up=Format(Layout((0, 2, 1, 3)), device)))
    tensors = random_checkpoint(LLAMA)
    params, plain = load(LLAMA, tensors, shardings=formats), load(LLAMA, tensors)
    assert params.layers.w_gate_up.format.layout.major_to_minor == (0, 2, 1, 3)
    assert_params_equal(params, plain)
    # Weights in memory: what lies otherwise is copied, the others are not, and neither is deleted.
    taken = params_from_arrays(plain, spec, {}, None, "float32", formats)
    assert taken.layers.w_gate_up.format.layout.major_to_minor == (0, 2, 1, 3)
    assert taken.layers.w_down is plain.layers.w_down
    assert_params_equal(taken, plain)


def test_shards_on_four_devices_equal_the_whole():
    """In a process of its own, because the number of devices is fixed when jax starts."""
    script = textwrap.dedent("""
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxserve.models.params import DecoderParams, LayerParams
        from jaxserve.models.registry import ignorable, name_map, resolve
        from jaxserve.weights import load as load_module
        from tests.models.checkpoints import random_checkpoint
        from tests.weights.test_load import lazy
        from tests.weights.tiny import FAMILIES

        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
        s = lambda *axes: NamedSharding(mesh, P(*axes))
        largest = 0
        make = load_module._aligned_empty
        def spy(shape, dtype):
            global largest
            largest = max(largest, int(np.prod(shape)))
            return make(shape, dtype)
        load_module._aligned_empty = spy
        for family in ("llama", "phi3"):
            config = FAMILIES[family]
            spec = resolve(config, None)
            shardings = DecoderParams(
                embed=s(None, "model"), final_norm=s(), lm_head=s("model"),
                layers=LayerParams(
                    attn_norm=s(), mlp_norm=s(), wqkv=s(None, None, "model"), wo=s(None, "model"),
                    w_gate_up=s(None, "data", None, "model"), w_down=s(None, "model")))
            tensors = lazy(random_checkpoint(config))
            args = spec, name_map(config, spec), tensors, "float32"
            whole = load_module.load_params(*args)
            biggest_leaf, largest = max(leaf.size for leaf in jax.tree.leaves(whole)), 0
            seen = []
            sharded = load_module.load_params(*args, shardings, ignorable, lambda *progress: seen.append(progress))
            assert largest <= biggest_leaf // 2, (largest, biggest_leaf)
            assert seen[-1][0] == seen[-1][1], seen[-1]
            for a, b, want in zip(*map(jax.tree.leaves, (whole, sharded, shardings))):
                assert b.sharding.is_equivalent_to(want, b.ndim)
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        print("equal")
    """)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env=_child_environment(XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    assert result.stdout == "equal\n", result.stderr


def _child_environment(**changes: str) -> dict[str, str]:
    import os
    from pathlib import Path

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"} | changes
