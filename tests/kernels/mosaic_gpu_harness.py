"""The Hopper kernels under the shared tests: interpreted on the CPU, with race detection."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from kernels_pallas.mosaic_gpu import interpreted
from tests.kernels.harness import REFERENCE
from tests.kernels.scenes import Shape

# Contexts of several steps of 64 and 128 tokens and of several parts; every head dim; groups of 1 to 5 heads; pages
# smaller and larger than a step; query blocks smaller and larger than a warpgroup's rows.
SHAPES = {
    "mixed": Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, pages_per_seq=17, decodes=5, chunks=3,
                   query_block=32, dtype="bfloat16"),
    "all features": Shape(heads=5, kv_heads=1, head_dim=128, page_size=8, pages_per_seq=33, decodes=3, chunks=4,
                          dtype="bfloat16", softcap=5.0, windowed=True, sinks=True),
    "large heads": Shape(heads=2, kv_heads=2, head_dim=256, page_size=128, pages_per_seq=2, decodes=2, chunks=2,
                         dtype="float16", windowed=True),
}
TINY = Shape(heads=2, kv_heads=1, head_dim=64, page_size=16, pages_per_seq=17, decodes=2, chunks=2, query_block=8,
             dtype="bfloat16")

# An interpreted call takes seconds (on jax 0.10 a quarter of a minute): the body of all backends runs with the slow
# tests, and test_mosaic_gpu.py has what is always run.
MOSAIC_GPU = dataclasses.replace(
    REFERENCE, shapes=SHAPES, tiny=TINY, examples=2, marks=(pytest.mark.slow,),
    running=functools.partial(interpreted, detect_races=True))
