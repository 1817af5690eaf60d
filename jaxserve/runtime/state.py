"""DeviceState: everything that a step carries to the next. Donated and updated in place."""

from __future__ import annotations

from typing import Any

from flax import struct

from jaxserve.sampling.slots import SlotState


@struct.dataclass
class DeviceState:
    """`pool`: the attention backend's KV pool. `slots`: per running sequence, its token ids and options."""

    pool: Any
    slots: SlotState
