"""Where a checkpoint's tensor goes: the link between a family's tensor names and the parameter pytree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Placement:
    """One checkpoint tensor's place in one parameter leaf.

    Attributes:
        leaf: dotted path in DecoderParams, e.g. "layers.wqkv" or "embed".
        index: index of the region in the leaf that this tensor fills: ints and slices, e.g.
            `(layer, slice(None), slice(None), slice(0, G))`; `()` is the whole leaf.
        shape: the tensor's shape in the checkpoint.
        to_leaf: view of the tensor (no copy: reshapes and transposes) with the region's shape.
    """

    leaf: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    to_leaf: Callable[[np.ndarray], np.ndarray]


# name in the checkpoint -> its places. Phi-3's fused qkv_proj has one (a transposed view fills Q, K and V
# in three placements of the same tensor, so the value is a tuple).
NameMap = dict[str, tuple[Placement, ...]]
