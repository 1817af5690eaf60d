"""The Hopper kernels through the GPU's own compilers, which need no GPU: they fit, and the pool is updated in place.

`scripts/compile_check.py` compiles what the engine's models need and looks for spills; here is what else a model may
ask for.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kernels_pallas as kernels
from jaxserve.capacity.jobs import missing_compiler
from jaxserve.capacity.targets import parse_target
from jaxserve.capacity.worker import compile_only_device
from tests.kernels.layers import lower_layers, model

H100 = parse_target("gpu:h100")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_compiler(H100) is not None, reason="needs pip install 'jaxserve[cuda-compiler]'")]

MODELS = {
    "Llama-3-8B, float16": (model(32, 8, 128, "float16"), {}),
    "Gemma-2-9B, sinks": (model(16, 8, 256, softcap=50.0), {"windowed": True, "sinks": True}),
    "SmolLM2-135M": (model(9, 3, 64), {}),
    "gpt-oss-20b": (model(64, 8, 64), {"windowed": True, "sinks": True}),
    "Llama-2-7B": (model(32, 32, 128), {}),
    "the largest group": (model(48, 2, 128), {"sinks": True}),
    "pages of 8": (model(32, 8, 64, page_size=8), {}),
    "pages of 256": (model(32, 8, 128, page_size=256), {}),
}


@pytest.mark.parametrize("decodes, chunks", [(32, 0), (32, 8)], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_compiles_and_updates_the_pool_in_place(name: str, decodes: int, chunks: int):
    spec, features = MODELS[name]
    mesh = Mesh(np.array([compile_only_device(H100)]), ("x",))
    with jax.set_mesh(mesh):
        compiled = lower_layers("mosaic_gpu", spec, decodes, chunks, features.get("windowed", False),
                                features.get("sinks", False), q_dtype=spec.dtype,
                                sharding=NamedSharding(mesh, PartitionSpec())).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = kernels.pool_bytes(spec, "mosaic_gpu")
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes
