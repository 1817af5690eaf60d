"""How large the KV pool may be."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax

import kernels_pallas as kernels
from jaxserve.config import CPU_POOL_LIMIT_BYTES, EngineConfig
from jaxserve.errors import OutOfMemoryError

logger = logging.getLogger(__name__)

# Left free on an accelerator beside weights, pool and the largest step's temporaries: the runtime's own
# buffers, executables and fragmentation.
_ACCELERATOR_MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """`num_pages` of one layer (dummy page included), and why, for the log."""

    num_pages: int
    reason: str


def available_ram() -> int:
    """Bytes of RAM that can be taken without swapping; bounded by the control group where there is one."""
    available = None
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if available is None:
        raise OSError("no MemAvailable in /proc/meminfo")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            limit_text = limit.read().strip()
            if limit_text != "max":
                available = min(available, int(limit_text) - int(current.read()))
    except (OSError, ValueError):
        pass  # no control group, or of version 1
    return max(available, 0)


def size_pool(config: EngineConfig, page_bytes: int, page_size: int, max_model_len: int, max_num_seqs: int,
              device: jax.Device, step_temp_bytes: int) -> PoolSize:
    """Decides the number of pages.

    Args:
        page_bytes: K and V of one page in all layers.
        step_temp_bytes: temporaries of the largest compiled step (accelerators).

    Raises:
        OutOfMemoryError: less than one sequence of max_model_len tokens would fit, with the numbers.
    """
    per_seq = -(-max_model_len // page_size)
    useful = per_seq * max_num_seqs + 1
    if config.num_pages is not None:
        # A hand-set pool may be smaller than a full-length sequence; admission then refuses what cannot fit.
        if config.num_pages < 2:
            raise OutOfMemoryError(f"num_pages={config.num_pages}: at least 2 are needed (page 0 is reserved)")
        return PoolSize(num_pages=config.num_pages, reason="set by num_pages")
    if config.kv_cache_memory_bytes is not None:
        budget, reason = config.kv_cache_memory_bytes, "set by kv_cache_memory_bytes"
    elif device.platform == "cpu":
        free = available_ram()
        budget = min(int(free * config.kv_cache_memory_fraction), CPU_POOL_LIMIT_BYTES)
        reason = (f"{config.kv_cache_memory_fraction:.0%} of {free / 2**30:.1f} GiB free RAM, at most "
                  f"{CPU_POOL_LIMIT_BYTES / 2**30:.0f} GiB")
    else:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        budget = int(limit * (1 - _ACCELERATOR_MARGIN)) - used - step_temp_bytes
        reason = (f"device limit {limit / 2**30:.1f} GiB less {used / 2**30:.1f} in use, "
                  f"{step_temp_bytes / 2**30:.2f} for the largest step and {_ACCELERATOR_MARGIN:.0%} margin")
    pages = min(budget // page_bytes, useful)
    if pages < per_seq + 1:
        raise OutOfMemoryError(
            f"the KV pool would hold {max(pages, 0)} pages of {page_size} tokens ({reason}), but one sequence of "
            f"max_model_len={max_model_len} tokens needs {per_seq} and page 0 is reserved "
            f"({(per_seq + 1) * page_bytes / 2**20:.0f} MiB); lower max_model_len or give the pool more memory "
            f"(kv_cache_memory_bytes, kv_cache_memory_fraction)")
    return PoolSize(num_pages=int(pages), reason=reason)


def page_bytes(spec: kernels.AttentionSpec) -> int:
    """Bytes of one page in all layers, K and V."""
    return spec.pool_bytes // spec.num_pages
