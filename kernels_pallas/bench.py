"""`python -m kernels_pallas.bench`: the time of paged attention, beside what the device's memory and matmuls give.

A case is run as a model does it: a scan over layers, each with its own pages, whose pool is donated and stays in
place. There are so many layers that no cache holds the pool. A time is that of one layer, the least of several runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels_pallas as kernels
from kernels_pallas import AttentionBatch, AttentionSpec, Backend

QUERY_BLOCK = 32
MIN_SECONDS, MIN_RUNS = 0.3, 3
# Of the pool, and of the arrays whose copy is timed: more than any cache holds.
POOL_BYTES = {"cpu": 1 << 27, "gpu": 1 << 29, "tpu": 1 << 29}
MATMUL_SIZE = {"cpu": 1024, "gpu": 8192, "tpu": 8192}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`batch` sequences, each with `rows` new tokens (1: decode) at the end of `context`; `dtype` of the pool."""

    rows: int
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int

    def spec(self, layers: int) -> AttentionSpec:
        return AttentionSpec(
            num_layers=layers, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            num_pages=self.batch * self.pages_per_seq + 1, page_size=self.page_size, dtype=self.dtype,
            scale=self.head_dim**-0.5, query_block=QUERY_BLOCK)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def bytes_moved(self) -> int:
        """The least that one layer reads and writes: each context's K and V once, the new rows, queries and output."""
        row = self.head_dim * jnp.dtype(self.dtype).itemsize + (4 if self.spec(1).quantized else 0)
        activations = self.rows * (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.activations.itemsize
        return self.batch * (2 * (self.context + self.rows) * self.kv_heads * row + activations)

    @property
    def flops(self) -> int:
        """Of both products, of what causality lets a row see."""
        seen = sum(range(self.context - self.rows + 1, self.context + 1))
        return 4 * self.batch * self.heads * self.head_dim * seen

    @property
    def activations(self) -> np.dtype:
        """The dtype of q, k and v: the pool's, or beside 8 bit pools the one that models have on the device."""
        if not self.spec(1).quantized:
            return jnp.dtype(self.dtype)
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def make_batch(case: Case) -> AttentionBatch:
    rng = np.random.default_rng(0)
    tables = 1 + rng.permutation(case.batch * case.pages_per_seq).reshape(case.batch, case.pages_per_seq)
    block = 1 if case.rows == 1 else -(-case.rows // QUERY_BLOCK) * QUERY_BLOCK
    return AttentionBatch(
        block_tables=jnp.asarray(tables, jnp.int32), kv_lens=jnp.full(case.batch, case.context, jnp.int32),
        query_starts=jnp.arange(case.batch, dtype=jnp.int32) * block,
        query_lens=jnp.full(case.batch, case.rows, jnp.int32),
        num_decode=case.batch if case.rows == 1 else 0, num_tokens=case.batch * block)


def best_seconds(call: Callable[[Any], Any], state: Any) -> float:
    """The least time of `state = call(state)`."""
    state = jax.block_until_ready(call(state))  # compiles
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        start = time.perf_counter()
        state = jax.block_until_ready(call(state))
        times.append(time.perf_counter() - start)
    return min(times)


def _random_leaf(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Ordinary numbers. Zeros would flatter an accelerator, whose clock depends on the power that it draws."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.random.uniform(key, leaf.shape).astype(leaf.dtype)
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")  # without the two upper bits a float is below 2
    return lax.bitcast_convert_type(jax.random.bits(key, leaf.shape, unsigned) >> 2, leaf.dtype)


def attention_seconds(case: Case, backend: Backend, pool_bytes: int) -> float:
    """Seconds of one layer, in a pool of `pool_bytes` or 64 layers, if that is less."""
    one = kernels.pool_bytes(case.spec(1), backend)
    spec = case.spec(min(max(2, -(-pool_bytes // one)), 64))
    batch = make_batch(case)
    shape = batch.num_tokens, case.heads + 2 * case.kv_heads, case.head_dim
    qkv = jax.random.normal(jax.random.key(1), shape).astype(case.activations)

    def layers(state):
        qkv, pool = state
        plan = kernels.plan_batch(batch, spec, backend)

        def body(carry, layer):
            q, pool = carry
            k, v = qkv[:, case.heads:case.heads + case.kv_heads], qkv[:, case.heads + case.kv_heads:]
            # Its queries are what the layer before gave, so no layer can be left out.
            return kernels.paged_attention(q, k, v, pool, plan, layer=layer, window=None, spec=spec,
                                           backend=backend), None

        (out, pool), _ = lax.scan(body, (qkv[:, :case.heads], pool), jnp.arange(spec.num_layers, dtype=jnp.int32))
        return qkv.at[:, :case.heads].set(out), pool

    wanted, structure = jax.tree.flatten(kernels.pool_spec(spec, backend))
    fill = jax.jit(lambda: [_random_leaf(key, leaf) for key, leaf in
                            zip(jax.random.split(jax.random.key(0), len(wanted)), wanted, strict=True)])
    state = qkv, jax.tree.unflatten(structure, fill())
    return best_seconds(jax.jit(layers, donate_argnums=0), state) / spec.num_layers


def stream_bandwidth(num_bytes: int) -> float:
    """Bytes per second of reading an array and writing it."""
    x = jnp.ones(num_bytes // 4, jnp.float32)
    return 2 * num_bytes / best_seconds(jax.jit(lambda x: x + 1, donate_argnums=0), x)


@functools.cache
def matmul_rate(dtype: np.dtype, size: int) -> float:
    """Floating point operations per second of a square product."""
    a = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(dtype)
    product = jax.jit(lambda x: jnp.dot(x, a, precision="highest" if dtype == np.float32 else None))
    return 2 * size**3 / best_seconds(product, a)


def measure(cases: list[Case], backends: list[Backend], device: jax.Device) -> Iterator[dict[str, Any]]:
    """One row of the table for each case and backend that can serve it."""
    pool_bytes = POOL_BYTES[device.platform]
    bandwidth = stream_bandwidth(pool_bytes)
    for case, backend in itertools.product(cases, backends):
        if kernels.why_not(backend, device, case.spec(2)) is not None:
            continue
        rate = matmul_rate(case.activations, MATMUL_SIZE[device.platform])
        seconds = attention_seconds(case, backend, pool_bytes)
        yield dataclasses.asdict(case) | {
            "backend": backend, "us": 1e6 * seconds,
            "gb_per_s": case.bytes_moved / seconds / 1e9, "of_stream": case.bytes_moved / seconds / bandwidth,
            "gflop_per_s": case.flops / seconds / 1e9, "of_matmul": case.flops / seconds / rate,
            "stream_gb_per_s": bandwidth / 1e9, "matmul_gflop_per_s": rate / 1e9}


HEADER = (f"{'case':<14}{'dtype':<15}{'batch':>6}{'context':>9}{'heads':>12}  {'backend':<11}{'us':>10}{'GB/s':>9}"
          f"{'stream':>8}{'GFLOP/s':>10}{'matmul':>8}")


def line(row: dict[str, Any]) -> str:
    kind = "decode" if row["rows"] == 1 else f"prefill {row['rows']}"
    heads = f"{row['heads']}/{row['kv_heads']}x{row['head_dim']}"
    return (f"{kind:<14}{row['dtype']:<15}{row['batch']:>6}{row['context']:>9}{heads:>12}  {row['backend']:<11}"
            f"{row['us']:>10.1f}{row['gb_per_s']:>9.1f}{row['of_stream']:>8.0%}{row['gflop_per_s']:>10.1f}"
            f"{row['of_matmul']:>8.0%}")


def _heads(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not HEADS/KV_HEADSxHEAD_DIM, for example 32/8x128")
    heads, kv_heads, head_dim = map(int, match.groups())
    return heads, kv_heads, head_dim


def parse(argv: list[str] | None, cpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=get_args(Backend), metavar="NAME",
                        help=f"{', '.join(get_args(Backend))}; default: all that run here but the reference")
    parser.add_argument("--heads", nargs="+", type=_heads, metavar="H/KxD",
                        default=[(9, 3, 64) if cpu else (32, 8, 128)])
    parser.add_argument("--dtype", nargs="+", choices=kernels.POOL_DTYPES, metavar="NAME",
                        default=["float32", "bfloat16", "int8"] if cpu else ["bfloat16", "float8_e4m3fn"],
                        help=f"of the pool: {', '.join(kernels.POOL_DTYPES)}")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8] if cpu else [1, 8, 64],
                        help="sequences of a decode case")
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048] if cpu else [1024, 8192])
    parser.add_argument("--prefill", nargs="+", type=int, default=[256] if cpu else [2048], metavar="ROWS",
                        help="new rows of a prefill case, which has one sequence; contexts below it are left out")
    parser.add_argument("--page-size", type=int, default=64 if cpu else 16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment there, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    device = jax.devices()[0]
    options = parse(argv, device.platform == "cpu")
    shapes = [(1, batch) for batch in options.batch] + [(rows, 1) for rows in options.prefill]
    cases = [Case(rows=rows, batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                  dtype=dtype, page_size=options.page_size)
             for (heads, kv_heads, head_dim), (rows, batch), context, dtype in itertools.product(
                 options.heads, shapes, options.context, options.dtype) if context >= rows]
    backends: list[Backend] = options.backend or [name for name in get_args(Backend) if name != "reference"]
    print(f"{device.device_kind}, jax {jax.__version__}")
    for backend in backends if cases else []:
        objection = kernels.why_not(backend, device, cases[0].spec(2))
        if objection is not None:
            print(f"left out: {objection}")
    print(HEADER)
    rows = []
    for row in measure(cases, backends, device):
        rows.append(row)
        print(line(row), flush=True)
    if rows:
        rates = {row["matmul_gflop_per_s"] for row in rows}
        print(f"stream: {rows[0]['stream_gb_per_s']:.1f} GB/s; matmul: {min(rates):.0f} to {max(rates):.0f} GFLOP/s")
    if options.json is not None:
        report = {"device": device.device_kind, "jax": jax.__version__, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
