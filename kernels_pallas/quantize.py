"""K and V rows in 8 bits, with one float32 scale for each token and kv head.

A scale belongs to a row, not to a page, because pages fill up token by token: a page's scale would have to change
after its first rows were stored. It is 4 bytes beside head_dim bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# What a row's largest magnitude is mapped to. -128 stays unused, so that int8 is symmetric.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}

# Below it XLA:CPU counts a float32 as zero, and its inverse is infinite or nearly so.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def quantize(rows: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Symmetric quantisation by each row's largest magnitude.

    In products only, no quotient of two arrays, because compilers replace those by products of their own choice:
    `scale = absmax * (1 / largest)`, `value = round(x * (1 / scale))`, to even, everything in float32. So every
    backend that calls this stores the same bits.

    Args:
        rows: [T, K, D] of any float dtype.
        dtype: "int8" or "float8_e4m3fn".

    Returns:
        (values [T, K, D] of `dtype`, scales f32 [T, K]); `values * scales[..., None]` is near `rows`. Rows of zeros,
        and those too small for a float32 scale, give zeros and scale 1. Rows with a NaN or an infinity give zeros
        and scale NaN: what attends to them is NaN, and nothing else is.
    """
    rows, largest = rows.astype(jnp.float32), LARGEST[dtype]
    top = jnp.abs(rows).max(axis=-1)                                                # [T, K]
    scales = top * np.float32(1 / largest)
    empty, broken = scales < _SMALLEST_SCALE, ~jnp.isfinite(top)
    scales = jnp.where(empty, 1.0, scales)
    values = jnp.where((empty | broken)[..., None], 0.0, rows * (1.0 / scales)[..., None])
    values = jnp.clip(jnp.round(values) if dtype == "int8" else values, -largest, largest)
    return values.astype(dtype), jnp.where(broken, jnp.nan, scales)
