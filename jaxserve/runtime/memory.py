"""How large the KV pool may be."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.config import CPU_POOL_LIMIT_BYTES, EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError

# Left free on an accelerator beside weights, pool and the largest step's temporaries: the runtime's own
# buffers, executables and fragmentation.
_ACCELERATOR_MARGIN = 0.03

# What XLA's errors say then.
_SIGNS_OF_TOO_LITTLE = ("RESOURCE_EXHAUSTED", "bad_alloc", "Out of memory")

# Where the system does not say how much RAM it has (Windows), a small machine is assumed.
_ASSUMED_RAM = 4 << 30


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """`num_pages` of one layer (dummy page included), and why, for the log."""

    num_pages: int
    reason: str


def size_pool(config: EngineConfig, *, page_bytes: int, page_size: int, max_model_len: int, max_num_seqs: int,
              device: jax.Device, weights_bytes: int, slots_bytes: int, step_temp_bytes: Callable[[], int]) -> PoolSize:
    """Decides the number of pages.

    Args:
        page_bytes: K and V of one page in all layers.
        weights_bytes: of weights that have yet to be loaded.
        slots_bytes: of the ids and options of `max_num_seqs` sequences.
        step_temp_bytes: gives the temporaries of the largest step. On accelerators it may take a compilation: it is
            only called for a pool whose size is not set by hand, and when the rest leaves something.

    Raises:
        OutOfMemoryError: what an engine needs beside its pool does not fit, or less than one sequence of
            max_model_len tokens would, with the numbers.
        ConfigError: the accelerator does not say how much memory it has, and the pool's size is not set by hand.
    """
    per_seq = -(-max_model_len // page_size)
    by_hand = config.num_pages is not None or config.kv_cache_memory_bytes is not None
    beside = _Beside(weights=weights_bytes, slots=slots_bytes)
    limit = _limit(device)
    if limit is not None:
        beside.check(limit, max_num_seqs, max_model_len)
        if device.platform == "cpu" or not by_hand:
            beside = dataclasses.replace(beside, temporaries=step_temp_bytes())
            beside.check(limit, max_num_seqs, max_model_len)
    if config.num_pages is not None:
        # A hand-set pool may be smaller than a full-length sequence; admission then refuses what cannot fit.
        _check_pool(config.num_pages * page_bytes, f"num_pages={config.num_pages}", limit, beside)
        return PoolSize(num_pages=config.num_pages, reason="set by num_pages")
    if config.kv_cache_memory_bytes is not None:
        budget, reason = config.kv_cache_memory_bytes, "set by kv_cache_memory_bytes"
        _check_pool(budget, reason, limit, beside)
    elif limit is None:
        raise ConfigError(f"{device.device_kind} does not say how much memory it has; set num_pages or "
                          f"kv_cache_memory_bytes")
    elif device.platform == "cpu":
        fraction = config.kv_cache_memory_fraction
        budget = min(int((limit.num_bytes - beside.total) * fraction), CPU_POOL_LIMIT_BYTES)
        reason = f"{fraction:.0%} of {limit.words}{beside.words}, at most {_gib(CPU_POOL_LIMIT_BYTES)}"
    else:
        budget = limit.num_bytes - beside.total
        reason = f"{limit.words}{beside.words}"
    pages, usable = budget // page_bytes, per_seq * max_num_seqs + 1
    if not by_hand and pages > usable:  # more would only help the prefix cache, and is there for the asking
        pages, reason = usable, f"all that {max_num_seqs} sequences of {max_model_len} tokens can use"
    if pages < per_seq + 1:
        raise OutOfMemoryError(
            f"the KV pool would hold {max(pages, 0)} pages of {page_size} tokens ({reason}), but one sequence of "
            f"max_model_len={max_model_len} tokens needs {per_seq} and page 0 is reserved "
            f"({(per_seq + 1) * page_bytes / 2**20:.0f} MiB); lower max_model_len or give the pool more memory "
            f"(kv_cache_memory_bytes, kv_cache_memory_fraction)")
    return PoolSize(num_pages=pages, reason=reason)


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """What may be taken of a device's memory, in words too."""

    num_bytes: int
    words: str


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """Bytes that an engine takes beside its pool."""

    weights: int
    slots: int
    temporaries: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.temporaries

    @property
    def words(self) -> str:
        parts = [f"{_gib(num_bytes)} {what}" for num_bytes, what in (
            (self.weights, "of weights to come"), (self.slots, "for the sequences' ids and options"),
            (self.temporaries, "for the largest step")) if num_bytes]
        return f" less {', '.join(parts)}" if parts else ""

    def check(self, limit: _Limit, max_num_seqs: int, max_model_len: int) -> None:
        if self.total <= limit.num_bytes:
            return
        remedy = ("a smaller model, or dtype=\"bfloat16\"" if self.weights > limit.num_bytes else
                  "lower max_num_seqs, max_model_len or max_num_batched_tokens")
        raise OutOfMemoryError(
            f"an engine with max_num_seqs={max_num_seqs} and max_model_len={max_model_len} does not fit even without "
            f"a KV pool: {limit.words}{self.words} are {_gib(self.total - limit.num_bytes)} too little; {remedy}")


def _limit(device: jax.Device) -> _Limit | None:
    """None: the device does not say."""
    if device.platform == "cpu":
        free = available_ram()
        return _Limit(num_bytes=free, words=f"{_gib(free)} free RAM")
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    total, used = stats["bytes_limit"], stats.get("bytes_in_use", 0)
    words = f"device limit {_gib(total)} less a margin of {_ACCELERATOR_MARGIN:.0%} and {_gib(used)} in use"
    return _Limit(num_bytes=int(total * (1 - _ACCELERATOR_MARGIN)) - used, words=words)


def _check_pool(pool_bytes: int, reason: str, limit: _Limit | None, beside: _Beside) -> None:
    # A CPU's allocator overcommits, and the process is killed later.
    if limit is not None and pool_bytes > limit.num_bytes - beside.total:
        raise OutOfMemoryError(f"the KV pool would take {_gib(pool_bytes)} ({reason}), but there are {limit.words}"
                               f"{beside.words}; lower num_pages, kv_cache_memory_bytes or max_num_seqs")


@contextlib.contextmanager
def memory_errors(doing: str) -> Iterator[None]:
    """What numpy and XLA raise inside when memory runs out becomes an OutOfMemoryError that says while `doing` what."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _SIGNS_OF_TOO_LITTLE):
            raise
        raise OutOfMemoryError(
            f"memory ran out while {doing} ({' '.join(str(error).split())[:200] or type(error).__name__}); lower "
            f"max_num_seqs, max_model_len, max_num_batched_tokens or the KV pool, or raise the process's limits "
            f"(ulimit -v, the container's memory)") from error


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def available_ram(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM that can be taken without swapping, bounded by the process's control groups and address space.

    Elsewhere than on Linux: half of all RAM, or of what a small machine has.

    Args:
        proc, cgroups: where Linux shows them.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _physical_ram() // 2
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(min([available, *_cgroup_rooms(proc, cgroups), *_address_space_room(proc)]), 0)


def _address_space_room(proc: Path) -> list[int]:
    """What `ulimit -v` leaves to this process, if it limits it."""
    import resource  # not on every system; here it is Linux

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    return [limit - int((proc / "self/statm").read_text().split()[0]) * resource.getpagesize()]


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
