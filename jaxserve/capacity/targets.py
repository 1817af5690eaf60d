"""Devices that a model can be planned for, from their data sheets. No jax.

A target is written `tpu:v5e:2x4` (a slice by its topology), `gpu:h100x8` or `cpu` (this machine). All numbers
are of one jax device; a TPU7x chip is two of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.errors import ConfigError

Platform = Literal["tpu", "gpu", "cpu"]

# XLA's allocator takes three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
DEFAULT_GPU_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class CudaProperties:
    """What XLA's CUDA compiler asks of a device; names and units as in its GpuDeviceInfoProto."""

    capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    threads_per_core: int
    l2_cache_size: int
    clock_rate_ghz: float

    @property
    def arch(self) -> str:
        """As ptxas calls it. `a`: with the instructions that only this architecture has (wgmma)."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One jax device of a kind.

    Attributes:
        kind: jax's `device_kind`.
        memory_bytes: what programs can use of a TPU's HBM, as its compiler says; all of a GPU's memory.
        bandwidth: bytes per second of the memory.
        flops: dense bfloat16 operations per second (T4: float16, it has no bfloat16 units).
        topology: of TPUs: the smallest that its compiler knows; one device of it stands for any.
        dimensions, devices_per_chip: of TPUs: of a slice's topology.
        most: of TPUs: chips in the largest slice; of GPUs: in one machine.
        source: of the numbers.
    """

    name: str
    platform: Platform
    kind: str
    memory_bytes: int
    bandwidth: float
    flops: float
    source: str
    most: int
    topology: str = ""
    dimensions: int = 0
    devices_per_chip: int = 1
    cuda: CudaProperties | None = None


_TPU_DOCS = "https://cloud.google.com/tpu/docs/"


def _tpu(name: str, kind: str, topology: str, *, memory_gib: float, bandwidth: float, flops: float, source: str,
         most: int, devices_per_chip: int = 1) -> Chip:
    return Chip(name=name, platform="tpu", kind=kind, memory_bytes=int(memory_gib * 2**30), bandwidth=bandwidth,
                flops=flops, source=_TPU_DOCS + source, most=most, topology=topology,
                dimensions=topology.count("x") + 1, devices_per_chip=devices_per_chip)


def _gpu(name: str, kind: str, capability: tuple[int, int], cores: int, fpus: int, *, memory_bytes: int,
         bandwidth: float, flops: float, shared: int, threads: int, l2: int, clock: float, source: str,
         most: int = 8) -> Chip:
    # Of a core's shared memory CUDA keeps 1 KiB for each block; before Ampere nothing.
    optin = shared if capability < (8, 0) else shared - 1024
    return Chip(name=name, platform="gpu", kind=kind, memory_bytes=memory_bytes, bandwidth=bandwidth, flops=flops,
                source=source, most=most, cuda=CudaProperties(
                    capability=capability, core_count=cores, fpus_per_core=fpus, shared_memory_per_core=shared,
                    shared_memory_per_block_optin=optin, threads_per_core=threads, l2_cache_size=l2,
                    clock_rate_ghz=clock))


_HOPPER: dict[str, Any] = {"cores": 132, "fpus": 128, "capability": (9, 0), "shared": 228 << 10, "threads": 2048,
                           "l2": 50 << 20, "clock": 1.98, "flops": 989e12}

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (
    _tpu("v5e", "TPU v5 lite", "2x2", memory_gib=15.75, bandwidth=819e9, flops=197e12, source="v5e", most=256),
    _tpu("v6e", "TPU v6 lite", "2x2", memory_gib=31.25, bandwidth=1638e9, flops=918e12, source="v6e", most=256),
    _tpu("v5p", "TPU v5", "2x2x1", memory_gib=95.74, bandwidth=2765e9, flops=459e12, source="v5p", most=6144),
    _tpu("tpu7x", "TPU7x", "2x2x1", memory_gib=94.75, bandwidth=3690e9, flops=1153.5e12, source="tpu7x",
         most=9216, devices_per_chip=2),
    _gpu("h100", "NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, bandwidth=3.35e12,
         source="https://www.nvidia.com/en-us/data-center/h100/", **_HOPPER),
    _gpu("h200", "NVIDIA H200", memory_bytes=150_754_820_096, bandwidth=4.8e12,
         source="https://www.nvidia.com/en-us/data-center/h200/", **_HOPPER),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, memory_bytes=85_100_068_864, bandwidth=2.039e12,
         flops=312e12, shared=164 << 10, threads=2048, l2=40 << 20, clock=1.41,
         source="https://www.nvidia.com/en-us/data-center/a100/", most=16),
    _gpu("l4", "NVIDIA L4", (8, 9), 58, 128, memory_bytes=24_152_899_584, bandwidth=300e9, flops=121e12,
         shared=100 << 10, threads=1536, l2=48 << 20, clock=2.04,
         source="https://www.nvidia.com/en-us/data-center/l4/"),
    _gpu("t4", "Tesla T4", (7, 5), 40, 64, memory_bytes=15_843_721_216, bandwidth=320e9, flops=65e12,
         shared=64 << 10, threads=1024, l2=4 << 20, clock=1.59,
         source="https://www.nvidia.com/en-us/data-center/tesla-t4/"),
)}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A number of equal devices. `chip` is None for this machine's CPU, of which there is no data sheet."""

    name: str
    platform: Platform
    chip: Chip | None
    num_devices: int

    @property
    def kind(self) -> str:
        return "cpu" if self.chip is None else self.chip.kind

    def usable_bytes(self, gpu_fraction: float = DEFAULT_GPU_FRACTION) -> int:
        """What jax's allocator gives out of one device's memory."""
        assert self.chip is not None, "the memory of a CPU is asked for, not looked up"
        return int(self.chip.memory_bytes * (gpu_fraction if self.platform == "gpu" else 1))


# Slices that can be had; larger ones with three dimensions are made of cubes of 4x4x4. Source: the pages that CHIPS
# name.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SOLID = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")


def _is_slice(sizes: list[int], most: int) -> bool:
    if "x".join(map(str, sizes)) in (*_FLAT, *_SOLID):
        return True
    return (len(sizes) == 3 and sizes == sorted(sizes) and not any(size % 4 for size in sizes)
            and math.prod(sizes) <= most)


def _slices(chip: Chip) -> str:
    if chip.dimensions == 2:
        return ", ".join(_FLAT)
    return f"{', '.join(_SOLID)}, and multiples of 4 in ascending order (4x4x8) up to {chip.most} chips"


def parse_target(name: str) -> Target:
    """A target by the name that users type.

    Raises:
        ConfigError: there is no such target; the known ones are named.
    """
    platform, _, rest = name.strip().lower().partition(":")
    if platform == "cpu" and not rest:
        return Target(name="cpu", platform="cpu", chip=None, num_devices=1)
    if platform == "tpu" and (match := re.fullmatch(r"(\w+?):(\d+(?:x\d+)*)", rest)):
        chip, sizes = CHIPS.get(match[1]), [int(size) for size in match[2].split("x")]
        if chip is not None and chip.platform == "tpu" and 0 not in sizes:
            if len(sizes) != chip.dimensions:
                raise ConfigError(f"target {name!r}: the topology of a {chip.name} slice has {chip.dimensions} "
                                  f"dimensions, for example tpu:{chip.name}:{chip.topology}")
            if not _is_slice(sizes, chip.most):
                raise ConfigError(f"target {name!r}: there is no such slice of {chip.name}; there are {_slices(chip)}")
            return Target(name=f"tpu:{rest}", platform="tpu", chip=chip,
                          num_devices=math.prod(sizes) * chip.devices_per_chip)
    if platform == "gpu" and (match := re.fullmatch(r"(\w+?)(?:x(\d+))?", rest)):
        chip, count = CHIPS.get(match[1]), int(match[2] or 1)
        if chip is not None and chip.platform == "gpu" and count > 0:
            if count > chip.most:
                raise ConfigError(f"target {name!r}: a machine has at most {chip.most} {chip.name}; give 1 to "
                                  f"{chip.most}")
            return Target(name=f"gpu:{chip.name}x{count}", platform="gpu", chip=chip, num_devices=count)
    tpus, gpus = (" ".join(chip.name for chip in CHIPS.values() if chip.platform == which) for which in ("tpu", "gpu"))
    raise ConfigError(f"unknown target {name!r}; known: tpu:KIND:TOPOLOGY with KIND of {tpus} (tpu:v5e:2x4), "
                      f"gpu:KINDxCOUNT with KIND of {gpus} (gpu:h100x8), and cpu")
