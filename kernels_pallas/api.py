"""Paged attention: the one contract that every backend keeps.

The KV pool holds `num_layers * num_pages` pages; a page holds `page_size` tokens of one layer. A
sequence's block table lists its page ids in order; the same id is used in every layer. Page 0 takes the
writes of padding rows and is never read for a real one.

A call covers a ragged batch: first `num_decode` rows of one token each (row i belongs to sequence i),
then prefill chunks, each starting at a multiple of `query_block` rows. All K/V rows of the call are
written before any is read, so sequences of one batch may share pages that this very call fills.

A page has at most one writer in a call: rows that two sequences of a batch write lie in different pages (page 0 apart,
where anything may stand). The engine shares full pages only, so it keeps to that by itself. `mosaic_tpu` reads,
changes and writes back pieces of pages, and of two writers' rows in one piece it would lose one's.

    batch -> plan_batch()      once a step: everything that does not depend on the layer
    q, k, v, pool, plan -> paged_attention()   once a layer

The pool is an opaque pytree; each backend lays it out as its device likes. A pool of an 8 bit dtype holds one
float32 scale for each token and kv head beside K and one beside V (`quantize`); scales live in the same pages, so
whoever copies or shares a page has them too.

A backend is a module with `pool_spec`, `plan_batch` and `paged_attention`, as below but without the `backend`
argument, and `unsupported(spec)`: what in the spec it cannot do, in words, or None.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from kernels_pallas.quantize import LARGEST

Backend = Literal["reference", "xla", "cpu_native", "mosaic_gpu", "mosaic_tpu"]
Pool = Any
Plan = Any

POOL_DTYPES = ("float32", "bfloat16", "float16", *LARGEST)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts about the attention of one model on one engine.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: of the model; query head h reads kv head
            `h // (num_heads // num_kv_heads)`.
        num_pages: pages of one layer, the dummy page 0 included.
        page_size: tokens in a page.
        dtype: of K and V in the pool, one of `POOL_DTYPES`; "int8" and "float8_e4m3fn" are quantised.
        scale: factor on q.k before the softmax.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: off.
        query_block: alignment of prefill chunks, in rows.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    dtype: str
    scale: float
    softcap: float | None = None
    query_block: int = 32

    def __post_init__(self) -> None:
        if self.dtype not in POOL_DTYPES:
            raise ValueError(f"a KV pool cannot be of dtype {self.dtype!r}; known: {', '.join(POOL_DTYPES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly")

    @property
    def quantized(self) -> bool:
        """K and V are in 8 bits, with scales."""
        return self.dtype in LARGEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """The ragged batch of one step: S sequences, T token rows.

    Attributes:
        block_tables: i32[S, pages_per_seq], page ids; unused entries are 0.
        kv_lens: i32[S], tokens in the context after this step's rows are written; 0: padding.
        query_starts: i32[S], first row of the sequence in the token axis.
        query_lens: i32[S], rows of the sequence in this step; 0: padding.
        num_decode: (static) sequences 0 .. num_decode - 1 are decode rows: sequence i is row i.
        num_tokens: (static) T.
    """

    block_tables: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    query_lens: jax.Array
    num_decode: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})


def token_rows(batch: AttentionBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sequence, position, valid) of every token row: i32[T], i32[T], bool[T]; padding rows give 0, 0, False."""
    row = jnp.arange(batch.num_tokens, dtype=jnp.int32)
    # Prefill sequences lie in ascending order, padding ones (query_len 0) at the end of the axis.
    starts = batch.query_starts[batch.num_decode:]
    chunk = jnp.sum(row[:, None] >= starts[None, :], axis=1, dtype=jnp.int32) - 1  # [T]
    seq = jnp.where(row < batch.num_decode, row, batch.num_decode + jnp.maximum(chunk, 0))
    seq = jnp.minimum(seq, batch.kv_lens.shape[0] - 1)
    offset = row - batch.query_starts[seq]
    valid = (offset >= 0) & (offset < batch.query_lens[seq])
    position = batch.kv_lens[seq] - batch.query_lens[seq] + offset
    return jnp.where(valid, seq, 0), jnp.where(valid, position, 0), valid


_SMALL_TPUS = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")

# What each backend needs of a device, in words and as a test; the fastest backend first. What it needs of the spec,
# its module knows, which is only imported where the device is right.
_NEEDS: dict[Backend, tuple[str, Callable[[Any], bool]]] = {
    "cpu_native": ("a CPU", lambda device: device.platform == "cpu"),
    # Its code for any other generation does not compile, or ends the process.
    "mosaic_gpu": ("a Hopper GPU (compute capability 9.x)",
                   lambda device: device.platform == "gpu" and str(device.compute_capability).startswith("9.")),
    "mosaic_tpu": ("a TPU of v5e or later, with 64 MiB of VMEM or more",
                   lambda device: device.platform == "tpu" and device.device_kind not in _SMALL_TPUS),
    "xla": ("any device", lambda device: True),
    "reference": ("any device", lambda device: True),
}


@dataclass(frozen=True)
class Choice:
    """A backend, and in a sentence why it was taken."""

    backend: Backend
    reason: str


def why_not(backend: Backend, device: Any, spec: AttentionSpec) -> str | None:
    """Why a backend cannot serve this spec on this device, in words; None: it can.

    Args:
        device: a jax Device, or anything with `platform`, `device_kind` and, for GPUs, `compute_capability`.

    Raises:
        ValueError: there is no such backend.
    """
    words, fits = _NEEDS[_known(backend)]
    if not fits(device):
        return f"{backend} needs {words}"
    missing = _module(backend).unsupported(spec)
    return None if missing is None else f"{backend} cannot do {missing}"


def choose_backend(device: Any, spec: AttentionSpec) -> Choice:
    """The fastest backend that can serve this spec on this device; arguments as for `why_not`."""
    objections: list[str] = []
    for backend in _NEEDS:
        objection = why_not(backend, device, spec)
        if objection is None:
            break
        objections.append(objection)
    kind = device.device_kind
    if device.platform == "gpu":
        kind += f" (compute capability {device.compute_capability})"
    return Choice(backend, f"{kind}: {'; '.join(objections)}" if objections else f"nothing faster is built for {kind}")


def _known(backend: Backend) -> Backend:
    if backend not in get_args(Backend):
        raise ValueError(f"unknown attention backend {backend!r}; known: {', '.join(get_args(Backend))}")
    return backend


def _module(backend: Backend) -> ModuleType:
    return importlib.import_module(f"kernels_pallas.{_known(backend)}")


def pool_spec(spec: AttentionSpec, backend: Backend) -> Pool:
    """The pool as a pytree of ShapeDtypeStructs. Tensor parallelism shards the kv-head axis, axis 1."""
    return _module(backend).pool_spec(spec)


def pool_bytes(spec: AttentionSpec, backend: Backend) -> int:
    """Bytes of the whole pool as the backend lays it out, scales and padding included."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool_spec(spec, backend)))


def init_pool(spec: AttentionSpec, backend: Backend) -> Pool:
    """An empty pool, which may hold anything. Jit it with `out_shardings` to make it where it belongs."""
    module = _module(backend)
    if hasattr(module, "init_pool"):
        return module.init_pool(spec)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), pool_spec(spec, backend))


def plan_batch(batch: AttentionBatch, spec: AttentionSpec, backend: Backend) -> Plan:
    """What the backend derives from the batch once a step, before the layers."""
    return _module(backend).plan_batch(batch, spec)


def paged_attention(q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool, plan: Plan, *, layer: jax.Array,
                    window: jax.Array | None, sinks: jax.Array | None = None, spec: AttentionSpec,
                    backend: Backend) -> tuple[jax.Array, Pool]:
    """Writes this step's K/V rows into the pool and attends, causally.

    Args:
        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim].
        pool: from `init_pool`; donate it, it is updated in place.
        plan: from `plan_batch`.
        layer: i32 scalar.
        window: i32 scalar, a token at position p sees positions (p - window, p]; None: all of them.
        sinks: f32[num_heads], a logit of each query head that takes part in the softmax without a value (gpt-oss);
            neither scale nor softcap touch it. None: none.

    Returns:
        (out [T, num_heads, head_dim] of q's dtype, pool). Rows of padding are zero.
    """
    return _module(backend).paged_attention(q, k, v, pool, plan, layer=layer, window=window, sinks=sinks,
                                            spec=spec)
