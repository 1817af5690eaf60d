"""How weights lie on TPUs, as far as that shows without one; compile_check asks the TPUs' compiler."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format

from jaxserve.models.params import abstract_params
from jaxserve.models.registry import resolve
from jaxserve.runtime import weight_formats as module
from kernels_pallas._compat import single_device_sharding
from tests.weights.tiny import LLAMA


@pytest.fixture
def formats_on(monkeypatch):
    """platform, kind, dtype -> the formats, without the platform's device."""
    sharding = single_device_sharding(jax.devices()[0])
    monkeypatch.setattr(module, "single_device_sharding", lambda device: sharding)

    def formats(platform: str, kind: str, dtype: str):
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        return module.weight_formats(abstract_params(resolve(LLAMA, None), dtype), device)

    return formats


@pytest.mark.parametrize("kind, dtype, tiling", [
    ("TPU v5 lite", "bfloat16", None), ("TPU v6 lite", "bfloat16", None), ("TPU7x", "float32", None),
    ("TPU7x", "bfloat16", ((16, 128), (2, 1)))])
def test_on_tpus_matrices_lie_as_products_read_them(formats_on, kind, dtype, tiling):
    formats = formats_on("tpu", kind, dtype)
    params = abstract_params(resolve(LLAMA, None), dtype)
    for name, last_two in (("wqkv", "DE"), ("wo", "DE"), ("w_gate_up", "EF"), ("w_down", "FE")):
        axes = {"wqkv": "LEKGD", "wo": "LHDE", "w_gate_up": "LE2F", "w_down": "LFE"}[name]
        layout = getattr(formats.layers, name).layout
        assert sorted(layout.major_to_minor) == list(range(getattr(params.layers, name).ndim))
        assert "".join(axes[i] for i in layout.major_to_minor[-2:]) == last_two
        assert layout.major_to_minor[0] == 0 and layout.tiling == tiling
    assert not isinstance(formats.embed, Format) and not isinstance(formats.layers.attn_norm, Format)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_elsewhere_arrays_lie_as_jax_makes_them(formats_on, platform):
    assert not any(isinstance(leaf, Format) for leaf in jax.tree.leaves(formats_on(platform, "any", jnp.bfloat16)))
