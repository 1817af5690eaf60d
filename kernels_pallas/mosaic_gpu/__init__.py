"""Paged attention for NVIDIA Hopper (compute capability 9.x) in Pallas Mosaic GPU.

Decode rows and prefill chunks have a kernel each. Both read K and V pages by TMA through the block table, and both
multiply with wgmma, which exists on this generation only: code for another one does not even compile, so whoever
chooses a backend looks at the device first (`choose_backend`).

    layout.py   what the kernels can do, block sizes, shared memory    plan.py      the work list of a step
    decode.py   split-K over pages, one query row a sequence           combine.py   joins the splits
    prefill.py  warp-specialised flash attention over pages            warpgroup.py what both kernels are made of
"""

from kernels_pallas.mosaic_gpu.attention import paged_attention
from kernels_pallas.mosaic_gpu.layout import pool_spec, unsupported
from kernels_pallas.mosaic_gpu.plan import plan_batch
from kernels_pallas.mosaic_gpu.warpgroup import interpreted

__all__ = ["interpreted", "paged_attention", "plan_batch", "pool_spec", "unsupported"]
