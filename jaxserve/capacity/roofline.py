"""The least time that a decode step can take: what it must read over the memory's bandwidth, or what it must
compute over the peak rate, whichever is longer (Williams et al., 2009). No engine is faster; how close ours comes
is measured (docs/performance.md), not promised here. Between devices nothing is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.capacity.footprint import streamed_weights
from jaxserve.capacity.targets import Chip
from jaxserve.models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class DecodeFloor:
    """One decode step of `batch` sequences with `context` tokens each, on each device.

    Attributes:
        weights_bytes, kv_bytes: read from memory.
        flops: operations.
        seconds: the least time.
        bound: what takes it.
        tokens_per_second: of the whole batch.
    """

    batch: int
    context: int
    weights_bytes: int
    kv_bytes: int
    flops: int
    seconds: float
    bound: Literal["memory", "compute"]

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def decode_floor(spec: DecoderSpec, dtype: str, chip: Chip, *, batch: int, context: int, kv_row_bytes: float,
                 degree: int = 1) -> DecodeFloor:
    """The floor of a decode step.

    Args:
        spec: the whole model.
        kv_row_bytes: K and V of one token in one layer, on each device.
        degree: of tensor parallelism.
    """
    seen = batch * sum(context if window is None else min(context, window) for window in spec.layer_windows)
    elements, weights = streamed_weights(spec, dtype, degree)
    kv = int(seen * kv_row_bytes)
    # Each weight takes part in a multiplication and an addition for each row; so does each of K and V for each
    # query head.
    flops = 2 * batch * elements + 4 * seen * spec.num_heads * spec.head_dim // degree
    memory, compute = (weights + kv) / chip.bandwidth, flops / chip.flops
    return DecodeFloor(batch=batch, context=context, weights_bytes=weights, kv_bytes=kv, flops=flops,
                       seconds=max(memory, compute), bound="memory" if memory >= compute else "compute")
