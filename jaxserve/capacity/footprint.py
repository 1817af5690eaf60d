"""What one device of several has to hold: the weights, by the arithmetic of tensor parallelism.

Every matrix is split over the tensor axis, attention by kv heads, the MLP by its width, embedding and head by
vocabulary; norms are held by all. Heads must divide evenly. Nothing here asks a device or a compiler.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxserve.models.params import abstract_params
from jaxserve.models.spec import DecoderSpec

# Leaves of DecoderParams that every device holds whole: norms, and the biases that are added after the sum over
# devices.
_REPLICATED = {"attn_norm", "mlp_norm", "q_norm", "k_norm", "post_attn_norm", "post_mlp_norm", "final_norm", "bo",
               "b_down"}


def tensor_degrees(spec: DecoderSpec, num_devices: int) -> tuple[int, ...]:
    """Degrees of tensor parallelism that divide devices, kv heads and MLP evenly, ascending; 1 is one of them."""
    common = math.gcd(num_devices, spec.num_kv_heads, spec.mlp_size)
    return tuple(degree for degree in range(1, common + 1) if common % degree == 0)


def share_of(spec: DecoderSpec, degree: int) -> DecoderSpec:
    """The decoder as one of `degree` devices computes it, but for the vocabulary, whose logits are kept whole."""
    return dataclasses.replace(spec, num_heads=spec.num_heads // degree, num_kv_heads=spec.num_kv_heads // degree,
                               mlp_size=spec.mlp_size // degree)


def first_layers(spec: DecoderSpec, num_layers: int) -> DecoderSpec:
    """The decoder with its first layers only."""
    return dataclasses.replace(spec, num_layers=num_layers, layer_windows=spec.layer_windows[:num_layers],
                               layer_uses_rope=spec.layer_uses_rope[:num_layers])


def weights_bytes(spec: DecoderSpec, dtype: str, degree: int = 1) -> int:
    """Of the weights on each of `degree` devices."""
    return sum(size * leaf_bytes for _, size, leaf_bytes in _leaves(spec, dtype, degree))


def streamed_weights(spec: DecoderSpec, dtype: str, degree: int = 1) -> tuple[int, int]:
    """(elements, bytes) of the weights that every step reads whole, on each device.

    All but an embedding that is not tied to the head, of which a step only reads its tokens' rows.
    """
    leaves = [(size, leaf_bytes) for name, size, leaf_bytes in _leaves(spec, dtype, degree)
              if name != "embed" or spec.tie_embeddings]
    return sum(size for size, _ in leaves), sum(size * leaf_bytes for size, leaf_bytes in leaves)


def _leaves(spec: DecoderSpec, dtype: str, degree: int) -> list[tuple[str, int, int]]:
    """(name, elements on a device, bytes of an element)."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(spec, dtype)):
        name, size = path[-1].name, math.prod(leaf.shape)
        leaves.append((name, size if name in _REPLICATED else -(-size // degree), leaf.dtype.itemsize))
    return leaves
