"""The subprocess of jobs.py: {"job", "dump_dir"} as JSON on standard input, on standard output a line of JSON for
each program.

`python -m jaxserve.capacity.worker`
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import kernels_pallas as kernels
from jaxserve.capacity.footprint import first_layers, share_of
from jaxserve.capacity.jobs import Compiled, Job
from jaxserve.capacity.ptx import KernelUse, take_dumped
from jaxserve.capacity.targets import Chip, Target, parse_target
from jaxserve.config import EngineConfig
from jaxserve.models.registry import resolve
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.memory import PoolSize
from jaxserve.runtime.planning import smallest_plan, with_pool
from jaxserve.runtime.programs import EnginePlan, Program
from kernels_pallas._compat import single_device_sharding


def compile_only_device(target: Target) -> jax.Device:
    """A device that programs can be compiled for, though it may not be there (for "cpu" it is this machine's).

    Raises:
        jax.errors.JaxRuntimeError: the platform's compiler is missing or does not know the device.
    """
    if target.chip is None:
        return jax.devices("cpu")[0]
    if target.platform == "tpu":
        return topologies.get_topology_desc(f"{target.chip.name}:{target.chip.topology}", platform="tpu").devices[0]
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=_target_config(target.chip), topology="1x1x1").devices[0]


def _target_config(chip: Chip) -> str:
    """A GPU as XLA's GpuTargetConfigProto, in text."""
    cuda = chip.cuda
    assert cuda is not None
    major, minor = cuda.capability
    extension = "ACCELERATED_FEATURES" if cuda.arch.endswith("a") else "NONE"
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {cuda.threads_per_core}
          shared_memory_per_block: 49152  shared_memory_per_core: {cuda.shared_memory_per_core}
          shared_memory_per_block_optin: {cuda.shared_memory_per_block_optin}
          core_count: {cuda.core_count}  fpus_per_core: {cuda.fpus_per_core}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
          memory_bandwidth: {int(chip.bandwidth)}  l2_cache_size: {cuda.l2_cache_size}
          clock_rate_ghz: {cuda.clock_rate_ghz}  device_memory_size: {chip.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          device_vendor: "NVIDIA Corporation"  name: "{chip.kind}"
          driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"  dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{chip.kind}"
    """


def plan_of(job: Job, device: jax.Device) -> EnginePlan:
    """The engine that the job describes.

    Raises:
        ValueError: the backend that it names cannot serve it, with the reason.
    """
    config = EngineConfig.from_options(dict(job.options))
    spec = share_of(resolve(dict(job.config), config.max_model_len), job.degree)
    if job.num_layers is not None:
        spec = first_layers(spec, job.num_layers)
    plan = with_pool(smallest_plan(spec, job.dtype, config, spec.vocab_size, device),
                     PoolSize(num_pages=job.num_pages, reason="as the job says"))
    if job.backend is not None:
        backend: Any = job.backend
        if (reason := kernels.why_not(backend, device, plan.step.attention)) is not None:
            raise ValueError(reason)
        plan = dataclasses.replace(plan, step=dataclasses.replace(plan.step, backend=backend))
    return plan


def lower_attention(plan: EnginePlan, bucket: Bucket) -> jax.stages.Lowered:
    """One layer's paged attention, as the bucket's step calls it, with the pool donated."""
    spec, backend = plan.step.attention, plan.step.backend
    sharding = single_device_sharding(plan.device)
    windowed = any(window is not None for window in plan.step.model.layer_windows)

    def attend(pool, q, k, v, block_tables, kv_lens, query_starts, query_lens, layer, window):
        batch = kernels.AttentionBatch(
            block_tables=block_tables, kv_lens=kv_lens, query_starts=query_starts, query_lens=query_lens,
            num_decode=bucket.decode_rows, num_tokens=bucket.num_tokens)
        return kernels.paged_attention(
            q, k, v, pool, kernels.plan_batch(batch, spec, backend), layer=layer,
            window=window if windowed else None, spec=spec, backend=backend)

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    pool = jax.tree.map(lambda leaf: array(leaf.dtype, *leaf.shape), kernels.pool_spec(spec, backend))
    seqs, rows, dtype = bucket.num_seqs(plan.config.query_block), bucket.num_tokens, plan.params.embed.dtype
    kv = array(dtype, rows, spec.num_kv_heads, spec.head_dim)
    return jax.jit(attend, donate_argnums=0).lower(
        pool, array(dtype, rows, spec.num_heads, spec.head_dim), kv, kv,
        array("int32", seqs, plan.config.max_pages_per_seq), *[array("int32", seqs)] * 3, array("int32"),
        array("int32"))


def compile_program(plan: EnginePlan, program: Program, part: Literal["step", "attention"],
                    kernel_use: Callable[[], tuple[KernelUse, ...]]) -> Compiled:
    """Compiles one program and asks the compiler what it takes. Whatever it raises becomes the `error`."""
    started, cpu_started = time.perf_counter(), time.process_time()
    # Pallas takes the kind of TPU that it builds for from the mesh.
    mesh = jax.sharding.Mesh(np.array([plan.device]), ("device",))
    try:
        with jax.set_mesh(mesh):
            if part == "step":
                lowered = plan.lower(program)
            else:
                assert isinstance(program, Bucket), program
                lowered = lower_attention(plan, program)
            compiled = lowered.compile()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        assert memory is not None
        has_pool = isinstance(program, Bucket)
        return Compiled(
            program=str(program), backend=plan.step.backend, seconds=seconds, cpu_seconds=cpu_seconds,
            pool_bytes=plan.pool_bytes if has_pool else 0,
            pool_copies=copies_of(kernels.pool_spec(plan.step.attention, plan.step.backend), text) if has_pool else 0,
            argument_bytes=memory.argument_size_in_bytes, alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes, code_bytes=memory.generated_code_size_in_bytes,
            vmem_bytes=_vmem_bytes(text) if plan.device.platform == "tpu" else 0, kernels=kernel_use())
    except Exception as error:  # a compiler's report: every failure is a result
        return Compiled(program=str(program), backend=plan.step.backend, error=_in_words(error))


def copies_of(arrays: Any, text: str) -> int:
    """How many instructions of a compiled program, given as text, copy as many elements as one of the arrays has.

    By elements and not by shape, because a copy may be into another one.
    """
    sizes = {math.prod(leaf.shape) for leaf in jax.tree.leaves(arrays)}
    copied = re.findall(r"^\s*(?:ROOT )?\S+ = \(?\w+\[([\d,]+)\].* copy(?:-start)?\(", text, re.MULTILINE)
    return sum(math.prod(map(int, shape.split(","))) in sizes for shape in copied)


def _vmem_bytes(text: str) -> int:
    """The most vector memory that a Pallas kernel of a TPU program takes; in the text it is memory space 1."""
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    sizes = [int(size) for call in calls
             for size in re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"', call)]
    return max(sizes, default=0)


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def main(write: Callable[[str], Any]) -> None:
    order = json.load(sys.stdin)
    job, dump_dir = Job(**order["job"]), order["dump_dir"]
    target = parse_target(job.target)

    def kernel_use() -> tuple[KernelUse, ...]:
        if dump_dir is None or target.chip is None or target.chip.cuda is None:
            return ()
        return take_dumped(dump_dir, target.chip.cuda.arch)

    def report(compiled: Compiled) -> None:
        write(json.dumps(dataclasses.asdict(compiled)))

    try:
        plan = plan_of(job, compile_only_device(target))
    except Exception as error:  # then no program can be compiled, all for the same reason
        for name in job.programs:
            report(Compiled(program=name, error=_in_words(error)))
        return
    programs = {str(program): program for program in plan.programs}
    for name in job.programs:
        report(compile_program(plan, programs[name], job.part, kernel_use))


if __name__ == "__main__":
    # Compilers write to file descriptor 1 what they like; the results go to a copy of it, and it to standard error.
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        main(lambda line: print(line, file=results, flush=True))
