"""How large the KV pool may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.config import CPU_POOL_LIMIT_BYTES, EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError

# Left free on an accelerator beside weights, pool and the largest step's temporaries: the runtime's own
# buffers, executables and fragmentation.
_ACCELERATOR_MARGIN = 0.03

# Where the system does not say how much RAM it has (Windows), a small machine is assumed.
_ASSUMED_RAM = 4 << 30


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """`num_pages` of one layer (dummy page included), and why, for the log."""

    num_pages: int
    reason: str


def size_pool(config: EngineConfig, *, page_bytes: int, page_size: int, max_model_len: int, max_num_seqs: int,
              device: jax.Device, weights_bytes: int, step_temp_bytes: Callable[[], int]) -> PoolSize:
    """Decides the number of pages.

    Args:
        page_bytes: K and V of one page in all layers.
        weights_bytes: of weights that have yet to be loaded.
        step_temp_bytes: gives the temporaries of the largest compiled step; called for accelerators only.

    Raises:
        OutOfMemoryError: less than one sequence of max_model_len tokens would fit, with the numbers.
        ConfigError: the accelerator does not say how much memory it has, and the pool's size is not set by hand.
    """
    per_seq = -(-max_model_len // page_size)
    if config.num_pages is not None:
        # A hand-set pool may be smaller than a full-length sequence; admission then refuses what cannot fit.
        if config.num_pages < 2:
            raise OutOfMemoryError(f"num_pages={config.num_pages}: at least 2 are needed (page 0 is reserved)")
        _check_ram(config.num_pages * page_bytes, f"num_pages={config.num_pages}", device, weights_bytes)
        return PoolSize(num_pages=config.num_pages, reason="set by num_pages")
    if config.kv_cache_memory_bytes is not None:
        budget, reason = config.kv_cache_memory_bytes, "set by kv_cache_memory_bytes"
        _check_ram(min(budget, (per_seq * max_num_seqs + 1) * page_bytes), reason, device, weights_bytes)
    elif device.platform == "cpu":
        budget, reason = _cpu_budget(config.kv_cache_memory_fraction, weights_bytes)
    else:
        budget, reason = _accelerator_budget(device, weights_bytes, step_temp_bytes)
    pages = min(budget // page_bytes, per_seq * max_num_seqs + 1)
    if pages < per_seq + 1:
        raise OutOfMemoryError(
            f"the KV pool would hold {max(pages, 0)} pages of {page_size} tokens ({reason}), but one sequence of "
            f"max_model_len={max_model_len} tokens needs {per_seq} and page 0 is reserved "
            f"({(per_seq + 1) * page_bytes / 2**20:.0f} MiB); lower max_model_len or give the pool more memory "
            f"(kv_cache_memory_bytes, kv_cache_memory_fraction)")
    return PoolSize(num_pages=pages, reason=reason)


def _check_ram(pool_bytes: int, reason: str, device: jax.Device, weights_bytes: int) -> None:
    # An accelerator's allocator refuses by itself; a CPU's overcommits, and the process is killed later.
    if device.platform == "cpu" and pool_bytes > (room := available_ram() - weights_bytes):
        raise OutOfMemoryError(f"the KV pool would take {_gib(pool_bytes)} ({reason}), but {_gib(room)} of RAM are "
                               f"free; lower num_pages, kv_cache_memory_bytes or max_num_seqs")


def _cpu_budget(fraction: float, weights_bytes: int) -> tuple[int, str]:
    free = available_ram()
    budget = min(int((free - weights_bytes) * fraction), CPU_POOL_LIMIT_BYTES)
    less = f" less {_gib(weights_bytes)} of weights" if weights_bytes else ""
    return budget, f"{fraction:.0%} of {_gib(free)} free RAM{less}, at most {_gib(CPU_POOL_LIMIT_BYTES)}"


def _accelerator_budget(device: jax.Device, weights_bytes: int, step_temp_bytes: Callable[[], int]) -> tuple[int, str]:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not say how much memory it has; set num_pages or "
                          f"kv_cache_memory_bytes")
    limit, used, temp = stats["bytes_limit"], stats.get("bytes_in_use", 0), step_temp_bytes()
    budget = int(limit * (1 - _ACCELERATOR_MARGIN)) - used - weights_bytes - temp
    return budget, (f"device limit {_gib(limit)} less {_gib(used)} in use, {_gib(weights_bytes)} of weights to come, "
                    f"{_gib(temp)} for the largest step and a margin of {_ACCELERATOR_MARGIN:.0%}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def available_ram(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM that can be taken without swapping, bounded by the process's control groups.

    Elsewhere than on Linux: half of all RAM, or of what a small machine has.

    Args:
        proc, cgroups: where Linux shows them.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _physical_ram() // 2
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(min([available, *_cgroup_rooms(proc, cgroups)]), 0)


def _physical_ram() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _ASSUMED_RAM


# Where the memory controller of each version of control groups keeps its numbers: below the mount point, the
# names of limit and usage, and which line of memory.stat counts file pages that nobody maps, subgroups included.
_CGROUP_FILES = {
    2: (".", "memory.max", "memory.current", "inactive_file"),
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int]:
    """What each limited control group around this process has left: the group's own and its parents'. A system may
    have both versions mounted, with the memory controller in one of them.

    Source: the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory.
    """
    own = {1: "/", 2: "/"}
    try:
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                own[2] = group
            elif "memory" in controllers.split(","):
                own[1] = group
    except OSError:
        pass
    return [room for version, group in own.items() for room in _rooms_up_from(group, cgroups, version)]


def _rooms_up_from(own: str, cgroups: Path, version: int) -> list[int]:
    below, limit_file, usage_file, reclaimable = _CGROUP_FILES[version]
    root = cgroups / below
    group, rooms = root / own.lstrip("/"), []
    while True:
        try:
            limit = (group / limit_file).read_text().strip()
            if limit != "max":  # version 1 has a number beyond any RAM for it
                # File pages that nobody maps are given up on demand; without this, reading the weights' file
                # would look like memory used up.
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / usage_file).read_text()) - int(stat.get(reclaimable, 0))
                rooms.append(int(limit) - used)
        except OSError:
            pass  # the root has no limit; in a container, the groups outside of it are not to be seen
        if group == root or root not in group.parents:
            return rooms
        group = group.parent
