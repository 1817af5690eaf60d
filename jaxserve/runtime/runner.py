"""The runner: owns parameters and state, launches steps, fetches their results later.

One thread calls it. `launch` returns before the device is done; `fetch` waits. The state is donated to
each step, so after a failed launch or fetch it is gone: `reset_state` makes an empty one, and the
scheduler recomputes (see EngineCore).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.config import ResolvedConfig
from jaxserve.engine.request import ScheduledRow, StepPlan
from jaxserve.engine.results import Fault, LogprobRows, StepResult
from jaxserve.errors import ConfigError
from jaxserve.models.params import DecoderParams
from jaxserve.runtime.batch import pack
from jaxserve.runtime.buckets import Bucket, choose_bucket, prefill_capacity
from jaxserve.runtime.executables import Executables, compilations
from jaxserve.runtime.host_memory import give_back
from jaxserve.runtime.programs import ADMIT, EnginePlan
from jaxserve.runtime.state import DeviceState
from jaxserve.runtime.step import StepOutput
from jaxserve.sampling import slots as slot_state
from kernels_pallas._compat import single_device_sharding


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


class Runner:
    """Args:
        plan: what to run.
        params: the weights, in the dtype that was planned. They are kept, not copied, so they must not be donated
            or deleted while the runner lives.
        executables: the plan's programs; some may have been compiled already.

    Attributes:
        waited: seconds for which `launch` and `fetch` have waited for the device so far.
    """

    def __init__(self, plan: EnginePlan, params: DecoderParams, executables: Executables):
        self.plan = plan
        self.config: ResolvedConfig = plan.config
        self._query_block = plan.config.query_block
        self._executables = executables
        self._weights = _in_dtypes_of(plan.params, params)
        self._dtype = params.embed.dtype
        self.state: DeviceState | None = None
        self._init_state = jax.jit(plan.init_state, out_shardings=single_device_sharding(plan.device))
        # XLA's CPU client runs a program whose inputs are not ready yet on one of its own worker threads,
        # which then lacks in the matrix products: on two cores a step takes 1.7x as long. So on CPUs a step
        # is only started when its state is there: the step before it and uploads of slots are done. The host's
        # work still overlaps with them.
        self._one_at_a_time = plan.device.platform == "cpu"
        self.steps = self.rows_real = self.rows_padded = 0
        self.waited = 0.0
        self._compilations_at_warmup: int | None = None

    # -- set-up

    def reset_state(self) -> None:
        """An empty pool and empty slots, in place of whatever there was."""
        self._delete_state()
        with self._executables.cache():
            self.state = self._init_state()

    def _delete_state(self) -> None:
        if self.state is not None:
            for leaf in jax.tree.leaves(self.state):
                if not leaf.is_deleted():
                    leaf.delete()
            self.state = None

    def mark_warm(self) -> None:
        """From here on, `metrics` counts compilations as unwanted."""
        self._compilations_at_warmup = compilations()

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
        prefill_rows = sum(-(-row.num_tokens // self._query_block) * self._query_block for row in prefills)
        assert prefill_rows <= prefill_capacity(self.config), prefill_rows
        bucket = choose_bucket(self.plan.buckets, len(decodes), prefill_rows)
        batch = pack(decodes, prefills, bucket, block_tables, self._query_block)
        executable = self._executables.get(bucket)
        if self._one_at_a_time:
            self._wait_for(self.state)
        self.state, output = executable(self._weights, self.state, batch)
        self.steps += 1
        rows = (*decodes, *prefills)
        self.rows_real += sum(row.num_tokens for row in rows)
        steps = max(row.num_tokens for row in decodes) if bucket.decode_steps > 1 else 1
        self.rows_padded += bucket.num_tokens * steps
        # Start the copies now; `fetch` comes a step later. Log-probabilities only travel when asked for.
        output.token_ids.copy_to_host_async()
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

    def _wait_for(self, arrays: Any) -> None:
        started = time.perf_counter()
        jax.block_until_ready(arrays)
        self.waited += time.perf_counter() - started

    def _read(self, launch: _Launch, result: StepResult) -> None:
        self._wait_for(launch.output.token_ids)
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
            fault_at = next((k for k, token in enumerate(sampled) if token < 0), None)
            if fault_at is not None:
                result.failed[seq_id] = Fault(sampled[fault_at])
                del sampled[fault_at:]
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
            first += -(-row.num_tokens // self._query_block) * self._query_block

    # -- parameters, metrics, end

    @property
    def params(self) -> DecoderParams:
        """The weights in their own dtype."""
        return _in_dtypes_of(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self._dtype), self.plan.params),
                             self._weights)

    def update_params(self, params: DecoderParams) -> None:
        """Puts new weights in place of the old ones, between two steps; nothing is compiled again.

        Args:
            params: kept, not copied, if they are on the device already; see the constructor.

        Raises:
            ConfigError: structure, shape, dtype or sharding differ, naming the first leaf that does.
        """
        has, given = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (self._weights, params))
        for what, paths in (("lacks", has.keys() - given.keys()), ("has an unknown", given.keys() - has.keys())):
            if paths:
                raise ConfigError(f"update_params: the new parameters' structure differs: it {what} "
                                  f"{min(map(jax.tree_util.keystr, paths))}")
        for path, old in has.items():
            name, new = jax.tree_util.keystr(path), given[path]
            for what, wanted, found in (("shape", old.shape, new.shape), ("dtype", self._dtype, new.dtype)):
                if wanted != found:
                    raise ConfigError(f"update_params: {name} has {what} {wanted}, given {found}")
            if isinstance(new, jax.Array) and not new.sharding.is_equivalent_to(old.sharding, new.ndim):
                raise ConfigError(f"update_params: {name} is sharded as {old.sharding}, given {new.sharding}")
        placed = jax.tree.map(lambda old, new: jax.device_put(new, old.sharding), self._weights, params)
        self._weights = _in_dtypes_of(self.plan.params, placed)

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
            "kv_pool_bytes": self.plan.pool_bytes,
        }

    def close(self) -> None:
        """Frees the state's device memory and forgets the parameters."""
        self._delete_state()
        self._executables.clear()
        self._weights = None  # type: ignore[assignment]
        give_back()


def _in_dtypes_of(wanted: DecoderParams, params: DecoderParams) -> DecoderParams:
    """`params` with the bits of each leaf read as the dtype that `wanted` has there. Arrays on CPUs, uncopied."""
    def read_as(leaf: jax.Array, dtype: Any) -> jax.Array:
        if leaf.dtype == dtype:
            return leaf
        assert leaf.dtype.itemsize == np.dtype(dtype).itemsize, (leaf.dtype, dtype)
        return jax.device_put(np.asarray(leaf).view(dtype), leaf.sharding)

    return jax.tree.map(lambda want, leaf: read_as(leaf, want.dtype), wanted, params)


def _to_numpy(output) -> LogprobRows:
    return LogprobRows(token_logprob=np.asarray(output.token_logprob), token_rank=np.asarray(output.token_rank),
                       top_ids=np.asarray(output.top_ids), top_logprobs=np.asarray(output.top_logprobs))


def _rows(source: LogprobRows, index) -> LogprobRows:
    return LogprobRows(source.token_logprob[index], source.token_rank[index], source.top_ids[index],
                       source.top_logprobs[index])
