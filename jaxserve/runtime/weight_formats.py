"""How the weights lie in a device's memory: as the step's products read them.

On TPUs the last two axes of an array lie in tiles. A product whose matrix lies otherwise than it likes is preceded by
a copy of the matrix, in every layer and step: libtpu copied more than half of Llama-3-8B's weights, and on
TPU7x most of the others. Elsewhere arrays lie in the order of their axes, as jax makes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxserve.models.params import DecoderParams
from kernels_pallas._compat import single_device_sharding

# Axes from the slowest to the fastest: the inputs of a product and one axis of its outputs come last. Those of a head
# are before the inputs, because tiles are 128 wide, and heads may be smaller.
_ORDERS = {"wqkv": (0, 2, 3, 4, 1), "wo": (0, 1, 2, 3), "w_gate_up": (0, 2, 1, 3), "w_down": (0, 1, 2)}


def weight_formats(params: DecoderParams, device: jax.Device) -> DecoderParams:
    """For each leaf of `params` (anything with a dtype) a Format on TPUs, where it is a matrix of a layer stack; for
    all others a Sharding."""
    sharding = single_device_sharding(device)

    def where(path: Any, leaf: Any) -> jax.sharding.Sharding | Format:
        order = _ORDERS.get(path[-1].name) if device.platform == "tpu" else None
        if order is None:
            return sharding
        # Elsewhere the tiles that jax takes are the products' own (libtpu 0.0.42 and 0.0.50).
        tall = device.device_kind.startswith("TPU7") and leaf.dtype == jnp.bfloat16
        return Format(Layout(order, ((16, 128), (2, 1))) if tall else Layout(order), sharding)

    return jax.tree_util.tree_map_with_path(where, params)
