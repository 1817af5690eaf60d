"""Checks and times the GPU's attention kernels and a whole decode step on the device that is here.

    python -m scripts.device_check [--seconds 330] [--json FILE] [--smoke]

1. Every backend that can run here against the reference, on fresh random inputs: ragged batches, windows, soft caps,
   sinks, every supported dtype and head dim. An error beyond a few roundings makes the exit code 1.
2. One decode step of Qwen3-0.6B's and Llama-3-8B's shape, random weights, through the engine's own programs, beside
   the time in which the memory can deliver what it reads.
3. Decode and prefill attention over batch, context and heads, as shares of the measured bandwidth and of the measured
   matmul rate; torch's scaled_dot_product_attention beside it where torch is importable and has CUDA.

What there is no time for is left out, and said so. `--smoke`: tiny sizes on the CPU or whatever is here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels_pallas as kernels
from jaxserve.capacity.footprint import first_layers, streamed_weights
from jaxserve.capacity.known_models import KNOWN_MODELS
from jaxserve.capacity.models import find_model
from jaxserve.config import EngineConfig
from jaxserve.runtime.batch import NUM_COLUMNS, NUM_TOKENS, SAMPLES, SLOT, START
from jaxserve.runtime.planning import plan_engine, resolve_dtype
from kernels_pallas import bench

STEP_MODELS = ("qwen3-0.6b", "llama-3-8b")
# Llama-3-8B, Qwen3-0.6B, Gemma-2-9B, gpt-oss.
HEADS = ((32, 8, 128), (16, 8, 128), (16, 8, 256), (64, 8, 64))
# Rows of one prefill call that fills a context: the reference gathers the whole context for each of them.
FILL_ROWS = 128
# Values are about 1. Products of 16 bits round the weights of the softmax, and GPUs multiply float32 as TF32.
TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 4e-3, "int8": 5e-2, "float8_e4m3fn": 1e-1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A ragged batch with random contexts of up to `context` tokens, chunks of up to three query blocks."""

    heads: tuple[int, int, int]
    dtype: str
    decodes: int
    chunks: int
    context: int
    page_size: int = 16
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False

    @property
    def spec(self) -> kernels.AttentionSpec:
        H, K, D = self.heads
        pages = (self.decodes + self.chunks) * -(-self.context // self.page_size) + 1
        return kernels.AttentionSpec(num_layers=2, num_heads=H, num_kv_heads=K, head_dim=D, num_pages=pages,
                                     page_size=self.page_size, dtype=self.dtype, scale=D**-0.5, softcap=self.softcap)


def trials(smoke: bool) -> list[Trial]:
    if smoke:
        return [Trial(heads=(4, 2, 64), dtype="float32", decodes=2, chunks=3, context=96, window=40, sinks=True)]
    cases = [Trial(heads=heads, dtype=dtype, decodes=33, chunks=8, context=1500, **features)
             for heads, (dtype, features) in itertools.product(
                 (*HEADS, (9, 3, 64), (5, 1, 128)),
                 (("bfloat16", {}), ("float16", {"window": 300, "softcap": 30.0, "sinks": True})))]
    cases += [Trial(heads=(32, 8, 128), dtype="bfloat16", decodes=5, chunks=4, context=700, page_size=page_size)
              for page_size in (8, 64, 256)]
    cases += [Trial(heads=(32, 8, 128), dtype=dtype, decodes=9, chunks=4, context=700)
              for dtype in ("float32", "int8", "float8_e4m3fn")]
    return cases


def make_call(trial: Trial, rng: np.random.Generator) -> tuple[kernels.AttentionBatch, list[jax.Array], Any]:
    """(batch, [q, k, v], sinks). Contexts have lengths around every border there is, and a row of padding."""
    spec, R = trial.spec, trial.spec.query_block
    S, width = trial.decodes + trial.chunks, -(-trial.context // trial.page_size)
    lens = rng.integers(1, trial.context + 1, S)
    lens[:S // 3] = np.clip(rng.choice([64, 128, 256, 512], S // 3) + rng.integers(-1, 2, S // 3), 1, trial.context)
    lens[0] = 0
    counts = np.where(np.arange(S) < trial.decodes, np.minimum(lens, 1),
                      np.minimum(rng.integers(1, 3 * R, S), lens))
    blocks = -(-counts[trial.decodes:] // R) * R
    starts = np.concatenate([np.arange(trial.decodes), trial.decodes + np.cumsum(blocks) - blocks])
    T = trial.decodes + 3 * R * trial.chunks
    tables = 1 + rng.permutation(S * width).reshape(S, width)
    H, K, D = trial.heads
    dtype = jnp.dtype("bfloat16" if spec.quantized else trial.dtype)
    rows = [jnp.asarray(rng.normal(size=(T, heads, D)), dtype) for heads in (H, K, K)]
    # Chunks of padding come last and start behind the real ones.
    S_padded = trial.decodes + 3 * trial.chunks

    def ints(x, fill=0):
        return jnp.asarray(np.pad(x, (0, S_padded - S), constant_values=fill), jnp.int32)

    batch = kernels.AttentionBatch(
        block_tables=jnp.asarray(np.pad(tables, ((0, S_padded - S), (0, 0))), jnp.int32), kv_lens=ints(lens),
        query_starts=ints(starts, trial.decodes + int(blocks.sum())), query_lens=ints(counts),
        num_decode=trial.decodes, num_tokens=T)
    return batch, rows, jnp.asarray(rng.normal(size=H), jnp.float32) if trial.sinks else None


def attend(trial: Trial, backend: kernels.Backend, batch: kernels.AttentionBatch, rows, sinks) -> np.ndarray:
    """Fills the contexts by prefill calls of the backend's own, then makes the call: f32[T, H, D]."""
    spec, window = trial.spec, None if trial.window is None else jnp.int32(trial.window)
    S, width = batch.block_tables.shape
    pieces, head_counts = -(-width * spec.page_size // FILL_ROWS), [x.shape[1] for x in rows]

    def fill(at, pool):
        """A piece of one sequence's context, without its new rows."""
        i, begin = at // pieces, at % pieces * FILL_ROWS
        end = jnp.clip(batch.kv_lens[i] - batch.query_lens[i], begin, begin + FILL_ROWS)
        piece = kernels.AttentionBatch(
            block_tables=batch.block_tables[i][None], kv_lens=jnp.where(end > begin, end, 0)[None],
            query_starts=jnp.zeros(1, jnp.int32), query_lens=(end - begin)[None], num_decode=0, num_tokens=FILL_ROWS)
        q, k, v = (jax.random.normal(key, (FILL_ROWS, heads, spec.head_dim)).astype(rows[0].dtype)
                   for key, heads in zip(jax.random.split(jax.random.key(at), 3), head_counts, strict=True))
        plan = kernels.plan_batch(piece, spec, backend)
        return kernels.paged_attention(q, k, v, pool, plan, layer=jnp.int32(1), window=None, spec=spec,
                                       backend=backend)[1]

    def call(q, k, v, pool, sinks):
        pool = lax.fori_loop(0, S * pieces, fill, pool)
        plan = kernels.plan_batch(batch, spec, backend)
        return kernels.paged_attention(q, k, v, pool, plan, layer=jnp.int32(1), window=window, sinks=sinks, spec=spec,
                                       backend=backend)

    out, _ = jax.jit(call, donate_argnums=3)(*rows, kernels.init_pool(spec, backend), sinks)
    return np.asarray(out.astype(jnp.float32))


def check(device: Any, smoke: bool, seed: int, in_time) -> Iterator[dict[str, Any]]:
    """One row for each trial and backend."""
    rng = np.random.default_rng(seed)
    for trial in trials(smoke):
        backends = [name for name in get_args(kernels.Backend)
                    if name != "reference" and kernels.why_not(name, device, trial.spec) is None]
        if not in_time():
            return
        batch, rows, sinks = make_call(trial, rng)
        wanted = attend(trial, "reference", batch, rows, sinks)
        for backend in backends:
            error = float(np.abs(attend(trial, backend, batch, rows, sinks) - wanted).max())
            yield {"trial": dataclasses.asdict(trial), "backend": backend, "error": error,
                   "right": error <= TOLERANCE[trial.dtype]}


def decode_step(model: str, batch: int, context: int, device: Any, bandwidth: float,
                smoke: bool) -> dict[str, Any]:
    """The mean time of 32 steps in a row, as the runner launches them, and what memory alone would take."""
    spec = find_model(model).spec
    if smoke:
        spec = dataclasses.replace(first_layers(spec, 1), vocab_size=1024)
    dtype = resolve_dtype("auto", "bfloat16", device)
    pages = batch * -(-(context + 64) // 16) + 1
    plan = plan_engine(spec, dtype, EngineConfig(
        max_num_seqs=batch, max_model_len=context + 64, max_num_batched_tokens=32, page_size=16, num_pages=pages,
        compilation_cache_dir=""), spec.vocab_size, device)
    bucket = max(bucket for bucket in plan.buckets if not bucket.prefill_rows)
    leaves, structure = jax.tree.flatten(plan.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = jax.tree.unflatten(structure, [_random_weights(leaf.shape, leaf.dtype, key)
                                            for key, leaf in zip(keys, leaves, strict=True)])
    state = jax.jit(plan.init_state)()
    step = plan.lower(bucket).compile()
    rows = np.zeros((bucket.num_seqs(plan.config.query_block), NUM_COLUMNS + plan.config.max_pages_per_seq), np.int32)
    rows[:, SLOT], rows[:batch, SLOT] = batch, np.arange(batch)
    rows[:batch, NUM_TOKENS], rows[:batch, SAMPLES] = 1, 1
    tables = 1 + np.arange(pages - 1).reshape(batch, -1)
    rows[:batch, NUM_COLUMNS:] = tables[:, :rows.shape[1] - NUM_COLUMNS]

    def run(steps: int, first: int, state):
        for i in range(steps):
            rows[:batch, START] = first + i
            state, output = step(params, state, rows.copy())
        jax.block_until_ready(output.token_ids)
        return state

    state = run(2, context - 34, state)
    start = time.perf_counter()
    run(32, context - 32, state)
    seconds = (time.perf_counter() - start) / 32
    kv_bytes = batch * context * plan.pool_bytes / (pages * plan.config.page_size)
    floor = (streamed_weights(spec, dtype)[1] + kv_bytes) / bandwidth
    return {"model": model, "layers": spec.num_layers, "batch": batch, "context": context,
            "backend": plan.step.backend, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "of_floor": seconds / floor}


def _random_weights(shape: Sequence[int], dtype: Any, key: jax.Array) -> jax.Array:
    """Small numbers, made where they lie: a float32 copy of the largest stack would not fit beside it everywhere."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.jit(lambda key: jax.random.uniform(key, shape, dtype, -0.02, 0.02))(key)
    return jnp.zeros(shape, dtype)    # bits of bfloat16


def attention_table(device: Any, smoke: bool, bandwidth: float, in_time) -> Iterator[dict[str, Any]]:
    """Rows as of `kernels_pallas.bench`. The kernel for all heads, the portable path for the first."""
    pool_bytes = 1 << 20 if smoke else bench.POOL_BYTES[device.platform]
    heads = ((4, 2, 64),) if smoke else HEADS
    shapes = ((1, 2, 64), (64, 1, 64)) if smoke else (
        (1, 8, 1024), (2048, 1, 2048), (1, 64, 1024), (1, 1, 8192), (1, 8, 8192), (2048, 1, 8192), (1, 1, 1024))
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    rate = bench.matmul_rate(jnp.dtype(dtype), 256 if smoke else bench.MATMUL_SIZE[device.platform])
    for (H, K, D), (rows, batch, context) in itertools.product(heads, shapes):
        case = bench.Case(rows=rows, batch=batch, context=context, heads=H, kv_heads=K, head_dim=D, dtype=dtype,
                          page_size=16)
        chosen = kernels.choose_backend(device, case.spec(2)).backend
        backends = dict.fromkeys((chosen, "xla") if (H, K, D) == heads[0] and context <= 2048 else (chosen,))
        for backend in backends:
            if not in_time():
                return
            seconds = bench.attention_seconds(case, backend, pool_bytes)
            yield dataclasses.asdict(case) | {
                "backend": backend, "us": 1e6 * seconds,
                "gb_per_s": case.bytes_moved / seconds / 1e9, "of_stream": case.bytes_moved / seconds / bandwidth,
                "gflop_per_s": case.flops / seconds / 1e9, "of_matmul": case.flops / seconds / rate}


def torch_rows() -> Iterator[dict[str, Any]]:
    """torch's attention over contexts that lie together, not in pages: the same arithmetic and bytes."""
    try:
        torch = __import__("torch")
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    H, K, D = HEADS[0]
    for rows, batch, context in ((1, 8, 1024), (1, 64, 1024), (2048, 1, 2048)):
        q, k, v = (torch.randn(batch, heads, tokens, D, device="cuda", dtype=torch.bfloat16)
                   for heads, tokens in ((H, rows), (K, context), (K, context)))

        def run(times: int, q=q, k=k, v=v, rows=rows) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / times

        run(3)
        yield {"rows": rows, "batch": batch, "context": context, "us": 1e3 * run(50), "torch": torch.__version__}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.device_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330, help="leave out what would begin later (default 330)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there, too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does the script itself work?")
    options = parser.parse_args(argv)
    begin = time.perf_counter()

    def in_time() -> bool:
        late = time.perf_counter() - begin > options.seconds
        if late:
            print("... the rest is left out: no time", flush=True)
        return not late

    device, seed = jax.devices()[0], time.time_ns() % 2**32
    bandwidth = bench.stream_bandwidth(1 << 20 if options.smoke else bench.POOL_BYTES[device.platform])
    print(f"{device.device_kind}, jax {jax.__version__}, seed {seed}; stream {bandwidth / 1e9:.1f} GB/s")
    report: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "seed": seed,
                              "stream_gb_per_s": bandwidth / 1e9}

    report["checks"] = []
    for row in check(device, options.smoke, seed, in_time):
        report["checks"].append(row)
        trial = row["trial"]
        print(f"{'ok   ' if row['right'] else 'WRONG'} {row['backend']:<11} error {row['error']:.1e}  "
              f"{' '.join(f'{name}={value}' for name, value in trial.items() if value)}", flush=True)

    report["steps"] = []
    sizes = ((2, 64),) if options.smoke else ((8, 1024), (1, 1024), (64, 1024))
    for model, (batch, context) in itertools.product(STEP_MODELS[:1] if options.smoke else STEP_MODELS, sizes):
        assert model in KNOWN_MODELS
        if not in_time():
            break
        row = decode_step(model, batch, context, device, bandwidth, options.smoke)
        report["steps"].append(row)
        print(f"step of {model} ({row['layers']} layers), batch {batch}, context {context}, {row['backend']}: "
              f"{row['ms']:.2f} ms, {row['of_floor']:.2f} times its memory floor of {row['floor_ms']:.2f} ms",
              flush=True)

    print(bench.HEADER)
    report["attention"] = []
    for row in attention_table(device, options.smoke, bandwidth, in_time):
        report["attention"].append(row)
        print(bench.line(row), flush=True)
    report["torch"] = [] if options.smoke or not in_time() else list(torch_rows())
    for row in report["torch"]:
        print(f"torch {row['torch']} sdpa, {row['rows']} rows, batch {row['batch']}, context {row['context']}: "
              f"{row['us']:.1f} us")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    wrong = [row for row in report["checks"] if not row["right"]]
    print(f"{len(report['checks'])} checks, {len(wrong)} wrong; {time.perf_counter() - begin:.0f} s")
    return 1 if wrong or not report["checks"] else 0


if __name__ == "__main__":
    sys.exit(main())
