"""What differs between the jax versions that are supported. The only place that asks for the version."""

from __future__ import annotations

import jax

JAX_VERSION: tuple[int, int] = tuple(int(part) for part in jax.__version__.split(".")[:2])  # type: ignore[assignment]

# jax 0.10's CPU backend turns the whole stack of bfloat16 weights into float32 in every step when a scan
# slices it (SmolLM2-135M: 411 MB of temporaries, 5x the time). From 0.11 on it does not.
CPU_SCAN_WIDENS_BFLOAT16 = JAX_VERSION < (0, 11)
