"""Every backend lowers for the devices that it is meant for: what a compiler's front end can say without its back end.

No accelerator and none of their packages are needed. What only the compilers themselves reject (memory budgets,
alignments) is found by `make check-kernels`.
"""

from __future__ import annotations

import re
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

import kernels_pallas as kernels
from jaxserve.capacity.planner import stand_in
from jaxserve.capacity.targets import CHIPS, Chip, parse_target

# Custom calls that jax promises no stability of; here nothing is kept.
CALLS = [export.DisabledSafetyCheck.custom_call(name)
         for name in ("tpu_custom_call", "mosaic_gpu_v2", "__gpu$xla.gpu.triton")]
GEOMETRIES = {"llama-3-8b": (32, 8, 128), "gemma-2-9b": (16, 8, 256), "llama-3.2-1b": (32, 8, 64),
              "smollm2": (9, 3, 64)}
ROWS = {"decode": (8, 0), "mixed": (8, 64)}
PALLAS_CALL = {"mosaic_tpu": "tpu_custom_call", "mosaic_gpu": "mosaic_gpu_v2"}

# A chip for each way that a backend may go.
CASES = [("xla", "v5e"), ("xla", "t4"), ("mosaic_tpu", "v5e"), ("mosaic_tpu", "tpu7x"), ("mosaic_gpu", "h100")]


def lowered(chip: Chip, function, *args) -> str:
    """The text of a function lowered for a chip, which Pallas learns about from an abstract mesh."""
    platform: Literal["tpu", "cuda"] = "tpu" if chip.platform == "tpu" else "cuda"
    cores = 1 if chip.cuda is None else chip.cuda.core_count
    device = AbstractDevice(device_kind=chip.kind, num_cores=cores, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        return export.export(jax.jit(function, donate_argnums=0), platforms=[platform], disabled_checks=CALLS)(
            *args).mlir_module()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("backend, name", CASES, ids=str)
def test_attention_lowers(backend, name, geometry, rows):
    chip, (heads, kv_heads, head_dim) = CHIPS[name], GEOMETRIES[geometry]
    gemma = geometry == "gemma-2-9b"
    spec = kernels.AttentionSpec(
        num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_pages=64, page_size=16,
        dtype="bfloat16", scale=head_dim**-0.5, softcap=50.0 if gemma else None)
    target = parse_target(f"tpu:{name}:{chip.topology}" if chip.platform == "tpu" else f"gpu:{name}")
    reason = kernels.why_not(backend, stand_in(target), spec)
    if reason is not None:
        pytest.skip(reason)
    decode, prefill = ROWS[rows]
    seqs, tokens = decode + prefill // spec.query_block, decode + prefill

    def attend(pool, q, k, v, tables, kv_lens, starts, lens, layer, window):
        batch = kernels.AttentionBatch(block_tables=tables, kv_lens=kv_lens, query_starts=starts, query_lens=lens,
                                       num_decode=decode, num_tokens=tokens)
        return kernels.paged_attention(q, k, v, pool, kernels.plan_batch(batch, spec, backend), layer=layer,
                                       window=window if gemma else None, spec=spec, backend=backend)

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    kv, per_seq, scalar = array("bfloat16", tokens, kv_heads, head_dim), array("int32", seqs), array("int32")
    text = lowered(chip, attend, kernels.pool_spec(spec, backend), array("bfloat16", tokens, heads, head_dim), kv, kv,
                   array("int32", seqs, 8), per_seq, per_seq, per_seq, scalar, scalar)
    calls = set(re.findall(r"custom_call @([\w$.]+)", text))
    if backend in PALLAS_CALL:
        assert PALLAS_CALL[backend] in calls
    else:
        assert not calls & set(PALLAS_CALL.values())
