"""What differs between the jax versions that are supported. The only place that asks for the version."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import jax

JAX_VERSION: tuple[int, int] = tuple(int(part) for part in jax.__version__.split(".")[:2])  # type: ignore[assignment]

# jax 0.10's CPU backend turns the whole stack of bfloat16 weights into float32 in every step when a scan
# slices it (SmolLM2-135M: 411 MB of temporaries, 5x the time). From 0.11 on it does not.
CPU_SCAN_WIDENS_BFLOAT16 = JAX_VERSION < (0, 11)

# jax 0.12.1 deprecates the class for a function.
single_device_sharding: Any = getattr(jax.sharding, "make_single_device_sharding", None) or \
    jax.sharding.SingleDeviceSharding


def gpu_interpreter(*, detect_races: bool = False) -> Any:
    """The argument `interpret` of a Mosaic GPU kernel that lets it run on a CPU. Public from jax 0.11 on."""
    from jax.experimental.pallas import mosaic_gpu

    params: Any = getattr(mosaic_gpu, "InterpretGPUParams", None)
    if params is None:
        params = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params").InterpretGPUParams
    return params(detect_races=detect_races)


# Thread blocks that an interpreted kernel is run with. jax 0.10 compiles the program of every block anew.
GPU_INTERPRETED_BLOCKS = 1 if JAX_VERSION < (0, 11) else 3


@contextlib.contextmanager
def tpu_interpreter(dma_execution_mode: Literal["on_wait", "eager"] = "on_wait") -> Iterator[None]:
    """TPU kernels that are traced and run inside run on the CPU, under all checks that there are.

    A race, an access beyond the end of an array and a read before a copy was waited for raise; uninitialised memory
    reads as NaN. A copy that nobody ever waits for is only noticed in mode "eager", and only printed, as a semaphore's
    "non-zero count" at the kernel's end.
    """
    from jax.experimental.pallas import tpu as pltpu

    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma_execution_mode, uninitialized_memory="nan",
                                   out_of_bounds_reads="raise")
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(params):
        yield
    if JAX_VERSION < (0, 11):  # it prints races and notes that there were some; later versions raise
        interpreter: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
        if interpreter.races is not None and interpreter.races.races_found:
            raise RuntimeError("the interpreted TPU kernel has a race; see its output for where")
