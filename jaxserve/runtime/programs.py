"""An engine as a plan: its resolved options, and the programs that it runs, known by shapes alone.

Nothing here needs the weights, so a plan can be made, checked and compiled before they are loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

import kernels_pallas as kernels
from jaxserve.config import ResolvedConfig
from jaxserve.models.params import DecoderParams
from jaxserve.runtime.batch import NUM_COLUMNS
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.jax_settings import own_settings
from jaxserve.runtime.state import DeviceState
from jaxserve.runtime.step import StepSpec, step
from jaxserve.runtime.weight_formats import weight_formats
from jaxserve.sampling import slots
from kernels_pallas._compat import single_device_sharding

ADMIT: Literal["admit"] = "admit"
Program = Bucket | Literal["admit"]  # a step of one shape, or the upload of a sequence into its slot


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What an engine is going to be. Made by `plan_engine`.

    Attributes:
        params: shapes and dtypes of the weights as the step takes them.
        backend_reason: why attention runs on `step.backend`, for the log.
        pool_reason: why the KV pool has its size, for the log.
    """

    device: jax.Device
    config: ResolvedConfig
    step: StepSpec
    params: DecoderParams
    buckets: tuple[Bucket, ...]
    backend_reason: str
    pool_reason: str

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that any request can need."""
        return (ADMIT, *self.buckets)

    @property
    def pool_bytes(self) -> int:
        return kernels.pool_bytes(self.step.attention, self.step.backend)

    @property
    def weights_bytes(self) -> int:
        return _num_bytes(self.params)

    @property
    def weight_formats(self) -> DecoderParams:
        """Where each of the weights must lie, and how: see `weight_formats`."""
        return weight_formats(self.params, self.device)

    @property
    def logits_bytes(self) -> int:
        """Of the largest decode step; its temporaries are a few times that."""
        return self.config.max_num_seqs * self.config.vocab_size * 4

    @property
    def slots_bytes(self) -> int:
        """Ids, options and tables of the running sequences."""
        config = self.config
        return _num_bytes(slots.abstract_slots(config.max_num_seqs, config.max_model_len, config.vocab_size))

    @property
    def estimated_temp_bytes(self) -> int:
        """Temporaries of the largest step, as the sum of the arrays that live at once, where no compiler can say.

        Either those of the layers, for each row the residual stream and twice the widest product, or those of
        sampling, for each row that may sample five arrays of logits (ten on TPUs), all float32; and the
        log-probabilities that it returns. docs/capacity.md compares this with what the compilers say.
        """
        spec, config = self.step.model, self.config
        largest = max(self.buckets, key=lambda bucket: bucket.num_tokens)
        widest = max(2 * spec.mlp_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        rows = max(bucket.decode_steps * bucket.num_seqs(config.query_block) + bucket.prefill_rows
                   for bucket in self.buckets)
        return 8 * rows * config.max_logprobs + 4 * max(
            largest.num_tokens * (spec.hidden_size + 2 * widest),
            (10 if self.device.platform == "tpu" else 5) * largest.num_seqs(config.query_block) * spec.vocab_size)

    @own_settings()
    def init_state(self) -> DeviceState:
        """An empty pool and empty slots. Jit it with `out_shardings`."""
        config = self.config
        return DeviceState(
            pool=kernels.init_pool(self.step.attention, self.step.backend),
            slots=slots.init_slots(config.max_num_seqs, config.max_model_len, config.vocab_size))

    @own_settings()
    def lower(self, program: Program) -> jax.stages.Lowered:
        """Traces a program. Both kinds take the state, or its slots, donated."""
        sharding = single_device_sharding(self.device)

        def placed(tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        def weight(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        def vector(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        config, state = self.config, placed(jax.eval_shape(self.init_state))
        if program == ADMIT:
            ints, floats = slots.packed_sizes(config.max_model_len, config.vocab_size)
            return jax.jit(slots.admit, donate_argnums=0).lower(
                state.slots, vector(jnp.int32), vector(jnp.int32, ints), vector(jnp.float32, floats))
        batch = vector(jnp.int32, program.num_seqs(config.query_block), NUM_COLUMNS + config.max_pages_per_seq)
        params = jax.tree.map(weight, self.params, self.weight_formats)
        return jax.jit(partial(step, self.step, program), donate_argnums=1).lower(params, state, batch)


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
