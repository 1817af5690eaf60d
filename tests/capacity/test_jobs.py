"""Compiling in a subprocess: what comes back, also when the compiler fails or takes its process along."""

from __future__ import annotations

import jax
import pytest

from jaxserve.capacity import jobs
from jaxserve.capacity.footprint import first_layers
from jaxserve.capacity.models import find_model
from jaxserve.capacity.ptx import KernelUse, launch_shared_bytes, parse_report
from jaxserve.capacity.targets import parse_target
from jaxserve.capacity.worker import copies_of

OPTIONS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 16, "deterministic": True}
STEP = "decode2+prefill0"


def job(model, **changes) -> jobs.Job:
    found = find_model(model)
    return jobs.Job(**{"target": "cpu", "config": found.config, "dtype": "float32", "options": OPTIONS,
                       "num_pages": 4000, "programs": [STEP]} | changes)


def test_attention_alone_and_the_step_with_fewer_layers(tiny_model):
    step, = jobs.run(job(tiny_model, num_layers=1, backend="xla"))
    attention, = jobs.run(job(tiny_model, part="attention", backend="xla"))
    assert step.error is None and attention.error is None
    assert (step.backend, attention.backend) == ("xla", "xla")
    assert attention.pool_bytes == 2 * step.pool_bytes  # of two layers, and of the first one
    assert not step.pool_is_copied and not attention.pool_is_copied
    assert attention.argument_bytes < attention.pool_bytes + 10_000


def test_what_cannot_be_built_says_why(tiny_model):
    compiled, = jobs.run(job(tiny_model, backend="mosaic_tpu"))
    assert compiled.error is not None and "mosaic_tpu needs a TPU" in compiled.error


def test_a_process_that_ends_costs_one_program_only(tiny_model):
    """The name of a program that does not exist takes the process down, like a compiler that aborts."""
    first, lost, last = jobs.run(job(tiny_model, programs=["admit", "no-such-program", "admit"]))
    assert first.error is None and last.error is None
    assert lost.error is not None and "the compiler's process ended with code 1: KeyError" in lost.error


def test_a_pool_is_copied_if_it_is_not_written_in_place_or_moved_on_the_way():
    def copied(alias: int, copies: int) -> bool:
        return jobs.Compiled(program=STEP, pool_bytes=1000, alias_bytes=alias, pool_copies=copies).pool_is_copied

    assert not copied(1000, 0) and not copied(1200, 0)
    assert copied(999, 0) and copied(1000, 1)


def test_copies_of_the_pool_are_found_in_the_program_whatever_their_shape():
    pool = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in (("kv", (64, 8, 16, 256)),
                                                                             ("scales", (64, 8)))}
    text = """
  %copy.1 = bf16[64,8,16,256]{3,2,1,0:T(8,128)(2,1)} copy(%pool.1), metadata={op_name="jit(step)/while"}
  ROOT %copy.2 = u16[64,8,256,16]{2,3,1,0} copy(%bitcast.7)
  %copy-start.3 = (f32[64,8]{1,0:T(8,128)S(1)}, f32[64,8]{1,0}, u32[]{:S(2)}) copy-start(%scales.1)
  %copy.4 = bf16[64,8,16,128]{3,2,1,0} copy(%half.1)
  %fusion.5 = bf16[64,8,16,256]{3,2,1,0} fusion(%pool.1, %k.1), kind=kInput, calls=%copy_rows
  %parameter.6 = bf16[64,8,16,256]{3,2,1,0} parameter(0)
"""
    assert copies_of(pool, text) == 3


def test_only_spills_of_our_own_kernels_count():
    kernels = tuple(KernelUse(name="k", pallas=pallas, registers=255, spill_bytes=size, shared_bytes=0)
                    for pallas, size in ((True, 8), (False, 100), (True, 4)))
    assert jobs.Compiled(program=STEP, kernels=kernels).spills == 12


@pytest.mark.parametrize("name, extra", [("tpu:v5e:1x1", "tpu"), ("gpu:h100", "cuda-compiler")])
def test_a_compiler_that_is_not_installed_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    assert jobs.missing_compiler(parse_target(name)) == f"pip install '.[{extra}]' in a clone of jaxserve"
    assert jobs.missing_compiler(parse_target("cpu")) is None


def test_the_first_layers_of_a_model():
    gemma = find_model("gemma-2-9b").spec
    cut = first_layers(gemma, 3)
    assert (cut.num_layers, cut.layer_windows, len(cut.layer_uses_rope)) == (3, (4096, None, 4096), 3)


def test_reading_what_ptxas_says():
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'copy' for 'sm_90a'
ptxas info    : Function properties for copy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 380 bytes cmem[0]
"""
    assert parse_report(report, pallas=True) == [
        KernelUse(name="attend", pallas=True, registers=168, spill_bytes=20, shared_bytes=4096),
        KernelUse(name="copy", pallas=True, registers=12, spill_bytes=0, shared_bytes=0)]


def test_shared_memory_of_a_launch_is_read_from_the_passes_of_mosaic_gpu(tmp_path):
    log = tmp_path / "body_0.mlir-passes.log"
    log.write_text("%c384 = arith.constant 384 : index\n%c117888_i32 = arith.constant 117888 : i32 loc(#loc1)\n"
                   "%2 = gpu.launch async [%0] threads(%c384) dynamic_shared_memory_size %c117888_i32 {\n")
    assert launch_shared_bytes(log) == 117888
    assert launch_shared_bytes(tmp_path / "nothing") == 0
