"""A checkpoint as a lazy mapping: names to tensors that are read only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor of a checkpoint, known by shape and dtype before any of its bytes are read.

    Attributes:
        shape: the tensor's shape in the checkpoint.
        dtype: of the array that `read` returns.
        read: returns the values. What it returns may be a view of a mapped file, so it is not written
            to, and its memory goes when the last reference goes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


TensorMap = Mapping[str, LazyTensor]
