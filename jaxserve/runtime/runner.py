"""The runner: owns parameters and state, launches steps, fetches their results later.

One thread calls it. `launch` returns before the device is done; `fetch` waits. The state is donated to
each step, so after a failed launch or fetch it is gone: `reset_state` makes an empty one, and the
scheduler recomputes (see EngineCore).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas as kernels
from jaxserve.config import DEFAULT_MAX_MODEL_LEN, EngineConfig, ResolvedConfig
from jaxserve.engine.request import ScheduledRow, StepPlan
from jaxserve.engine.results import LogprobRows, StepResult
from jaxserve.errors import ConfigError
from jaxserve.models.params import DecoderParams, bfloat16_as_bits, bits_as_bfloat16
from jaxserve.models.spec import DecoderSpec
from jaxserve.runtime import memory
from jaxserve.runtime.batch import NUM_COLUMNS, pack
from jaxserve.runtime.buckets import Bucket, choose_bucket, make_buckets, prefill_capacity
from jaxserve.runtime.executables import Executables, compilations
from jaxserve.runtime.state import DeviceState
from jaxserve.runtime.step import FAILED, StepOutput, StepSpec, step
from jaxserve.sampling import slots as slot_state
from kernels_pallas._compat import CPU_SCAN_WIDENS_BFLOAT16

logger = logging.getLogger(__name__)

QUERY_BLOCK = 32
ADMIT = "admit"  # key of the slot upload among the executables


@dataclass(frozen=True, slots=True)
class _Launch:
    """One executable's run: its rows and what it returned."""

    decodes: Sequence[ScheduledRow]
    prefills: Sequence[ScheduledRow]
    bucket: Bucket
    output: StepOutput


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    plan: StepPlan
    launches: tuple[_Launch, ...]


def resolve_max_model_len(requested: int | None, spec: DecoderSpec) -> int:
    """The context length of an engine.

    Raises:
        ConfigError: more than the model's positions reach.
    """
    limit = spec.max_position if spec.rope.max_len is None else min(spec.max_position, spec.rope.max_len)
    if requested is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if requested > limit:
        raise ConfigError(f"max_model_len={requested}, but {spec.name} has {limit} positions; give at most {limit}")
    return requested


def resolve_dtype(dtype: str, checkpoint_dtype: str | None, device: jax.Device) -> str:
    """The dtype of weights and activations; see docs/models.md for why."""
    if dtype != "auto":
        return dtype
    if device.platform == "cpu":
        # bfloat16 doubles the speed where jax has fast paths for it; float16 has none on CPUs.
        return "bfloat16" if checkpoint_dtype == "bfloat16" and not CPU_SCAN_WIDENS_BFLOAT16 else "float32"
    return checkpoint_dtype if checkpoint_dtype in ("float16", "bfloat16", "float32") else "bfloat16"


class Runner:
    """Args:
        spec, params: the model; every leaf of `params` has the same dtype.
        config: the user's options.
        valid_vocab: ids below it may be sampled.
        device: where everything lives.
    """

    def __init__(self, spec: DecoderSpec, params: DecoderParams, config: EngineConfig, valid_vocab: int,
                 device: jax.Device):
        self.device = device
        cpu = device.platform == "cpu"
        dtype = str(params.embed.dtype)
        self._as_bits = cpu and dtype == "bfloat16" and CPU_SCAN_WIDENS_BFLOAT16
        self._weights = bfloat16_as_bits(params) if self._as_bits else params
        page_size = config.page_size or (64 if cpu else 16)
        max_model_len = resolve_max_model_len(config.max_model_len, spec)
        max_num_seqs = config.max_num_seqs or (32 if cpu else 256)
        budget = config.max_num_batched_tokens or (512 if cpu else 2048)
        if budget < QUERY_BLOCK:
            raise ConfigError(f"max_num_batched_tokens={budget}, but a prefill chunk takes {QUERY_BLOCK} rows at "
                              f"least; give {QUERY_BLOCK} or more")
        self._attention = kernels.AttentionSpec(
            num_layers=spec.num_layers, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, num_pages=2, page_size=page_size, dtype=dtype, scale=spec.attn_scale,
            softcap=spec.attn_softcap, query_block=QUERY_BLOCK)
        self._spec = StepSpec(
            model=spec, attention=self._attention, backend=kernels.choose_backend(device.platform),
            valid_vocab=min(valid_vocab, spec.vocab_size), max_logprobs=config.max_logprobs)
        if config.max_logprobs > self._spec.valid_vocab:
            raise ConfigError(f"max_logprobs={config.max_logprobs} is more than the vocabulary of "
                              f"{self._spec.valid_vocab}")
        self.config = ResolvedConfig(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            max_waiting_requests=config.max_waiting_requests, page_size=page_size, num_pages=2,
            enable_prefix_caching=config.enable_prefix_caching, scheduling_policy=config.scheduling_policy,
            decode_steps=config.decode_steps, deterministic=config.deterministic,
            max_logprobs=config.max_logprobs, query_block=QUERY_BLOCK, vocab_size=spec.vocab_size)
        # A single bfloat16 row takes a slow path of XLA's CPU matmul, two rows do not.
        self.buckets = make_buckets(self.config, min_decode_rows=2 if cpu and dtype == "bfloat16" else 1)
        self._executables = Executables(self._lower, config.compilation_cache_dir)
        self._size_pool(config)
        self._make_state = jax.jit(self._init_state)  # kept, so that a state lost to a fault costs no compilation
        self.state: DeviceState | None = None
        # XLA's CPU client runs a program whose inputs are not ready yet on one of its own worker threads,
        # which then lacks in the matrix products: on two cores a step takes 1.7x as long. So on CPUs a step
        # is only started when the one before it is done; the host's work still overlaps with it.
        self._one_at_a_time = cpu
        self._last_output: jax.Array | None = None
        self.steps = self.rows_real = self.rows_padded = 0
        self._compilations_at_warmup: int | None = None

    # -- set-up

    def _size_pool(self, config: EngineConfig) -> None:
        temp = 0
        if self.device.platform != "cpu" and config.num_pages is None and config.kv_cache_memory_bytes is None:
            # The pool is updated in place, so a step's temporaries do not depend on its size: compile the
            # largest shape with a tiny pool and ask.
            largest = max(self.buckets, key=lambda b: b.num_tokens)
            temp = self._lower(largest).compile().memory_analysis().temp_size_in_bytes
        page_bytes = memory.page_bytes(self._attention)
        size = memory.size_pool(config, page_bytes, self.config.page_size, self.config.max_model_len,
                                self.config.max_num_seqs, self.device, temp)
        self._attention = dataclasses.replace(self._attention, num_pages=size.num_pages)
        self._spec = dataclasses.replace(self._spec, attention=self._attention)
        self.config = dataclasses.replace(self.config, num_pages=size.num_pages)
        logger.info("KV pool: %d pages of %d tokens, %.0f MiB (%s)", size.num_pages, self.config.page_size,
                    size.num_pages * page_bytes / 2**20, size.reason)

    @property
    def pool_bytes(self) -> int:
        return self._attention.pool_bytes

    def _init_state(self) -> DeviceState:
        return DeviceState(
            pool=kernels.init_pool(self._attention, self._spec.backend),
            slots=slot_state.init_slots(self.config.max_num_seqs, self.config.max_model_len, self.config.vocab_size))

    def reset_state(self) -> None:
        """An empty pool and empty slots, in place of whatever there was."""
        self._delete_state()
        with jax.default_device(self.device):
            self.state = self._make_state()

    def _delete_state(self) -> None:
        if self.state is not None:
            for leaf in jax.tree.leaves(self.state):
                if not leaf.is_deleted():
                    leaf.delete()
            self.state = None

    def _lower(self, key: Any) -> jax.stages.Lowered:
        sharding = jax.sharding.SingleDeviceSharding(self.device)

        def abstract(tree):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        state = abstract(jax.eval_shape(self._init_state))
        if key == ADMIT:
            ints, floats = slot_state.packed_sizes(self.config.max_model_len, self.config.vocab_size)
            vectors = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((ints,), jnp.int32),
                       jax.ShapeDtypeStruct((floats,), jnp.float32))
            return jax.jit(slot_state.admit, donate_argnums=0).lower(state.slots, *abstract(vectors))
        columns = NUM_COLUMNS + self.config.max_pages_per_seq
        batch = jax.ShapeDtypeStruct((key.num_seqs(QUERY_BLOCK), columns), jnp.int32, sharding=sharding)
        return jax.jit(partial(step, self._spec, key), donate_argnums=1).lower(abstract(self._weights), state, batch)

    def compile(self, on_done: Callable[[Any], None] | None = None) -> None:
        """Compiles everything that any request can need."""
        self._executables.compile_all([ADMIT, *self.buckets], on_done)

    def mark_warm(self) -> None:
        """From here on, `metrics` counts compilations as unwanted."""
        self._compilations_at_warmup = compilations()

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    # -- steps

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step. Raises whatever jax raises; then the state is lost."""
        if self.state is None:
            self.reset_state()
        state = self.state
        assert state is not None
        for seq in plan.admitted:
            ints, floats = slot_state.pack_slot(seq.options, seq.prompt_len, seq.token_ids, self.config.max_model_len,
                                                self.config.vocab_size)
            slots = self._executables.get(ADMIT)(state.slots, np.int32(seq.slot), ints, floats)
            self.state = state = state.replace(slots=slots)
        if self.config.deterministic:  # a shape for each kind; see buckets.py
            parts = [part for part in (((), plan.prefills), (plan.decodes, ())) if part[0] or part[1]]
        else:
            parts = [(plan.decodes, plan.prefills)]
        launches = tuple(self._launch(decodes, prefills, plan.block_tables) for decodes, prefills in parts)
        return Launched(plan, launches)

    def _launch(self, decodes, prefills, block_tables: np.ndarray) -> _Launch:
        prefill_rows = sum(-(-row.num_tokens // QUERY_BLOCK) * QUERY_BLOCK for row in prefills)
        assert prefill_rows <= prefill_capacity(self.config), prefill_rows
        bucket = choose_bucket(self.buckets, len(decodes), prefill_rows)
        batch = pack(decodes, prefills, bucket, block_tables, QUERY_BLOCK)
        executable = self._executables.get(bucket)
        if self._one_at_a_time and self._last_output is not None:
            self._last_output.block_until_ready()
        self.state, output = executable(self._weights, self.state, batch)
        self._last_output = output.token_ids
        self.steps += 1
        self.rows_real += len(decodes) + sum(row.num_tokens for row in prefills)
        self.rows_padded += bucket.num_tokens
        # Start the copies now; `fetch` comes a step later. Log-probabilities only travel when asked for.
        output.token_ids.copy_to_host_async()
        rows = (*decodes, *prefills)
        if any(row.samples and row.seq.options.logprobs is not None for row in rows):
            jax.tree.map(lambda x: x.copy_to_host_async(), output.logprobs)
        if any(row.seq.options.prompt_logprobs is not None for row in prefills):
            jax.tree.map(lambda x: x.copy_to_host_async(), output.prompt_logprobs)
        return _Launch(decodes, prefills, bucket, output)

    def fetch(self, launched: Launched) -> StepResult:
        """Waits for a step. Raises what went wrong on the device; then the state is lost."""
        result = StepResult()
        for launch in launched.launches:
            self._read(launch, result)
        return result

    def _read(self, launch: _Launch, result: StepResult) -> None:
        ids = np.asarray(launch.output.token_ids)  # [K, S]
        logprobs = prompt = None
        places = [(i, row) for i, row in enumerate(launch.decodes)]
        places += [(launch.bucket.decode_rows + i, row) for i, row in enumerate(launch.prefills)]
        for at, row in places:
            options, seq_id = row.seq.options, row.seq.seq_id
            if not row.samples:
                continue
            count = row.num_tokens if launch.bucket.decode_steps > 1 else 1
            sampled = ids[:count, at].tolist()
            if FAILED in sampled:
                result.failed.add(seq_id)
                sampled = [max(token, 0) for token in sampled]
            result.token_ids[seq_id] = sampled
            if options.logprobs is not None:
                logprobs = logprobs or _to_numpy(launch.output.logprobs)
                result.logprobs[seq_id] = _rows(logprobs, (slice(0, count), at))
        first = 0
        for row in launch.prefills:
            if row.seq.options.prompt_logprobs is not None and row.start < row.seq.prompt_len - 1:
                prompt = prompt or _to_numpy(launch.output.prompt_logprobs)
                count = min(row.num_tokens, row.seq.prompt_len - 1 - row.start)
                result.prompt_logprobs[row.seq.seq_id] = (row.start, _rows(prompt, slice(first, first + count)))
            first += -(-row.num_tokens // QUERY_BLOCK) * QUERY_BLOCK

    # -- parameters, metrics, end

    @property
    def params(self) -> DecoderParams:
        """The weights in their own dtype."""
        if not self._as_bits:
            return self._weights
        return dataclasses.replace(self._weights, layers=bits_as_bfloat16(self._weights.layers))

    def update_params(self, params: DecoderParams) -> None:
        """Puts new weights in place of the old ones; nothing is compiled again.

        Raises:
            ConfigError: structure, shape, dtype or sharding differ, naming the first leaf that does.
        """
        old_leaves, old_tree = jax.tree.flatten_with_path(self.params)
        new_leaves, new_tree = jax.tree.flatten_with_path(params)
        if old_tree != new_tree:
            raise ConfigError(f"update_params: the structure differs; the engine has {old_tree}, given {new_tree}")
        placed = []
        for (path, old), (_, new) in zip(old_leaves, new_leaves, strict=True):
            name = jax.tree_util.keystr(path)
            for what, has, given in (("shape", old.shape, new.shape), ("dtype", old.dtype, new.dtype)):
                if has != given:
                    raise ConfigError(f"update_params: {name} has {what} {has}, given {given}")
            if isinstance(new, jax.Array):
                if not new.sharding.is_equivalent_to(old.sharding, new.ndim):
                    raise ConfigError(f"update_params: {name} is sharded as {old.sharding}, given {new.sharding}")
                placed.append(new)
            else:
                placed.append(jax.device_put(new, old.sharding))
        params = jax.tree.unflatten(old_tree, placed)
        self._weights = bfloat16_as_bits(params) if self._as_bits else params

    def metrics(self) -> dict[str, Any]:
        """Counters since start. `compilations_after_warmup` is None until `mark_warm`."""
        warm = self._compilations_at_warmup
        return {
            "steps": self.steps,
            "token_rows": self.rows_real,
            "token_rows_padded": self.rows_padded,
            "executables": len(self._executables),
            "compile_seconds": {str(key): round(value, 3) for key, value in self._executables.seconds.items()},
            "compilations_after_warmup": None if warm is None else compilations() - warm,
            "kv_pool_bytes": self.pool_bytes,
        }

    def close(self) -> None:
        """Frees the state's device memory and forgets the parameters."""
        self._delete_state()
        self._executables.clear()
        self._last_output = None
        self._weights = None  # type: ignore[assignment]


def _to_numpy(output) -> LogprobRows:
    return LogprobRows(token_logprob=np.asarray(output.token_logprob), token_rank=np.asarray(output.token_rank),
                       top_ids=np.asarray(output.top_ids), top_logprobs=np.asarray(output.top_logprobs))


def _rows(source: LogprobRows, index) -> LogprobRows:
    return LogprobRows(source.token_logprob[index], source.token_rank[index], source.top_ids[index],
                       source.top_logprobs[index])
