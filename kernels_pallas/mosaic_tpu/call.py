"""Both phases as one `pallas_call` over the whole pool, which it updates in place.

The kernel is one program without a grid: its phases, and the copies that run ahead from one tile to the next, are one
sequence. On v5p, where two cores make a device, one of them works.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.api import AttentionSpec
from kernels_pallas.mosaic_tpu.attend import LOWEST, attend, attend_scratch
from kernels_pallas.mosaic_tpu.blocks import Case, decode_case, prefill_case
from kernels_pallas.mosaic_tpu.layout import LANES, join_outputs, new_rows, new_scales, row_lanes, split_queries
from kernels_pallas.mosaic_tpu.plan import Plan, scalars
from kernels_pallas.mosaic_tpu.write import write_pages, write_scratch
from kernels_pallas.quantize import quantize

# Of 64 MiB a core on v5p and v7x, and 128 MiB on v5e and v6e. Compilers allow a kernel 16 MiB unless told otherwise.
_VMEM_LIMIT_BYTES = 48 << 20


def _sink_rows(sinks: jax.Array, case: Case, spec: AttentionSpec) -> jax.Array:
    """f32[H] -> f32[K, tile_rows, 128], as rows of a tile lie."""
    # No lower than where a running maximum starts: there a sink of -inf weighs nothing, as it must.
    by_group = jnp.maximum(sinks.astype(jnp.float32), LOWEST).reshape(spec.num_kv_heads, -1)
    rows = jnp.arange(case.tile_rows) % by_group.shape[1]
    return jnp.broadcast_to(by_group[:, rows, None], (spec.num_kv_heads, case.tile_rows, LANES))


def _cost(plan: Plan, q: jax.Array, spec: AttentionSpec) -> pl.CostEstimate:
    """For the compiler's scheduling: contexts are half of what the block tables could hold."""
    num_seqs = sum(tiles.table.shape[0] for tiles in (plan.decode, plan.prefill) if tiles is not None)
    tokens = plan.tables.size * spec.page_size // 2
    rows_a_seq = max(1, q.shape[0] // num_seqs)
    row_bytes = spec.num_kv_heads * row_lanes(spec) * jnp.dtype(spec.dtype).itemsize
    return pl.CostEstimate(
        flops=4 * tokens * rows_a_seq * spec.num_heads * spec.head_dim,
        transcendentals=tokens * rows_a_seq * spec.num_heads,
        bytes_accessed=tokens * row_bytes + 2 * q.size * q.dtype.itemsize + 2 * q.shape[0] * row_bytes)


def paged_attention(q, k, v, pool, plan: Plan, *, layer, window, sinks, spec: AttentionSpec):
    cases = {"decode": decode_case(spec), "prefill": prefill_case(spec)}
    num_decode = 0 if plan.decode is None else plan.decode.table.shape[0]
    cases = {name: case for name, case in cases.items() if getattr(plan, name) is not None}
    queries = split_queries(q, num_decode, decode_case(spec).rows, spec)
    out_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, q.dtype), queries)
    sink_rows = {name: None if sinks is None else _sink_rows(sinks, case, spec) for name, case in cases.items()}
    where = jnp.stack([jnp.int32(layer) * spec.num_pages, jnp.int32(0) if window is None else jnp.int32(window)])

    def kernel(where, ints, q_hbm, rows, scales, sinks_vmem, pool_in, out, pool_out, write_scratch, attend_scratch):
        del pool_in  # the same memory as pool_out
        tables, decode, prefill, writes = ints
        base = where[0]
        write_pages(writes, rows, scales, pool_out, base, write_scratch, spec)
        for name, tiles in (("decode", decode), ("prefill", prefill)):
            if tiles is not None:
                attend(cases[name], tiles, tables, q_hbm[name], pool_out, sinks_vmem[name], out[name], base,
                       None if window is None else where[1], attend_scratch[name], spec)

    scales = None
    if spec.quantized:
        (k, k_scales), (v, v_scales) = quantize(k, spec.dtype), quantize(v, spec.dtype)
        scales = new_scales(k_scales, v_scales, plan.writes.source, spec)
    operands = (where, scalars(plan), queries, new_rows(k, v, spec), scales, sink_rows, pool)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)

    def specs(tree, spec: pl.BlockSpec):
        return jax.tree.map(lambda _: spec, tree)

    in_specs = (*specs(operands[:2], pl.BlockSpec(memory_space=pltpu.SMEM)), *specs(operands[2:5], in_hbm),
                specs(sink_rows, pl.BlockSpec(memory_space=pltpu.VMEM)), specs(pool, in_hbm))
    num_inputs, num_outs, num_pool = (len(jax.tree.leaves(x)) for x in (operands, queries, pool))
    # Left the choice, XLA brings a small array of the pool into VMEM before every call, and back after it.
    pool_shape = jax.tree.map(lambda x: pltpu.HBM(x.shape, x.dtype), pool)
    out, pool = pl.pallas_call(
        kernel,
        out_shape=(out_shape, pool_shape),
        in_specs=in_specs,
        out_specs=(specs(queries, in_hbm), specs(pool, in_hbm)),
        scratch_shapes=(write_scratch(spec), {name: attend_scratch(case, q.dtype, q.dtype, spec)
                                              for name, case in cases.items()}),
        input_output_aliases={num_inputs - num_pool + i: num_outs + i for i in range(num_pool)},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT_BYTES),
        cost_estimate=_cost(plan, q, spec),
        name="paged_attention",
    )(*operands)
    return join_outputs(out, plan.valid, spec), pool
