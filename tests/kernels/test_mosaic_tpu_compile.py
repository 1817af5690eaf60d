"""The TPU kernel through the TPU's own compiler, which needs no TPU: it fits, and the pool is updated in place."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kernels_pallas as kernels
from jaxserve.capacity.worker import copies_of
from tests.kernels.layers import lower_layers, model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jaxserve[tpu]'")]

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")

# What of `lower_layers` is special in a model: windows and sinks.
MODELS = {
    "Llama-3-8B": (model(32, 8, 128), {}),
    "Qwen3-0.6B": (model(16, 8, 128), {}),
    "Gemma-2-9B": (model(16, 8, 256, softcap=50.0), {"windowed": True}),
    "SmolLM2-135M": (model(9, 3, 64), {}),
    "gpt-oss-20b": (model(64, 8, 64), {"windowed": True, "sinks": True}),
    "Llama-3-8B, int8": (model(32, 8, 128, "int8", 32), {}),
    "Llama-3-8B, fp8": (model(32, 8, 128, "float8_e4m3fn", 32), {}),
    "gpt-oss-20b, int8": (model(64, 8, 64, "int8", 64), {"windowed": True, "sinks": True}),
    "Llama-2-7B": (model(32, 32, 128), {}),
    "pages of 128": (model(32, 8, 128, page_size=128), {}),
    "head dim 80": (model(8, 2, 80), {}),
    "int8, small pages": (model(32, 8, 128, "int8", 16), {}),
}


def compile_layers(topology: str, spec: kernels.AttentionSpec, decodes: int, chunks: int, windowed: bool = False,
                   sinks: bool = False) -> jax.stages.Compiled:
    """A donated pool through four layers, for one device of the topology."""
    # libtpu takes a lock on the machine's TPUs, of which there are none, and looks for a description of them.
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_SKIP_MDS_QUERY", "1"),
                            ("TPU_WORKER_HOSTNAMES", "localhost")):
            environment.setenv(name, value)
        device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    mesh = Mesh(np.array([device]), ("x",))
    with jax.set_mesh(mesh):
        return lower_layers("mosaic_tpu", spec, decodes, chunks, windowed, sinks,
                            sharding=NamedSharding(mesh, PartitionSpec())).compile()


@pytest.mark.parametrize("decodes, chunks", [(32, 0), (32, 8)], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles_and_updates_the_pool_in_place(topology: str, name: str, decodes: int, chunks: int):
    spec, features = MODELS[name]
    compiled = compile_layers(topology, spec, decodes, chunks, **features)
    # Neither into a layout of XLA's own taste, nor into VMEM and back.
    assert copies_of(kernels.pool_spec(spec, "mosaic_tpu"), compiled.as_text()) == 0
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = kernels.pool_bytes(spec, "mosaic_tpu")
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scales_that_would_fit_vmem_stay_in_the_pool(topology: str):
    spec = dataclasses.replace(model(32, 8, 128, "int8", 32), num_pages=500)  # no array of a row has as many elements
    compiled = compile_layers(topology, spec, 256, 0)
    assert copies_of(kernels.pool_spec(spec, "mosaic_tpu"), compiled.as_text()) == 0
