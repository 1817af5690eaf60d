"""DMA copies that are started and waited for as a group.

A group is described once, by a function that visits its copies; starting and waiting run the same description. So a
copy that is started and never waited for, which neither the interpreter nor the compiler reports, cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import tpu as pltpu

Visit = Callable[[Any, Any, Any], None]  # (source ref, destination ref, semaphore)
Group = Callable[[Visit], None]


def start(group: Group) -> None:
    group(lambda source, destination, semaphore: pltpu.make_async_copy(source, destination, semaphore).start())


def wait(group: Group) -> None:
    group(lambda source, destination, semaphore: pltpu.make_async_copy(source, destination, semaphore).wait())
