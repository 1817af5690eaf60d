"""Ragged paged attention for TPUs in Pallas Mosaic, with the KV write fused into the kernel.

    layout.py  the pool's pages, and the call's rows as the kernel wants them
    blocks.py  block sizes for each case, and why
    plan.py    query tiles and page writes of a batch, worked out once a step
    copies.py  DMA copies that are started and waited for by the same description
    write.py   the kernel's first phase: new rows into their pages
    attend.py  its second phase: attention over pages, double buffered
    call.py    both phases as one `pallas_call`
"""

from kernels_pallas.mosaic_tpu.call import paged_attention
from kernels_pallas.mosaic_tpu.layout import pool_spec, unsupported
from kernels_pallas.mosaic_tpu.plan import plan_batch

__all__ = ["paged_attention", "plan_batch", "pool_spec", "unsupported"]
