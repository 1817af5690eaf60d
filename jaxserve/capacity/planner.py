"""Does a model fit a target, and what would an engine there be? Arithmetic, checked by the target's compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from jaxserve.capacity import jobs
from jaxserve.capacity.footprint import share_of, tensor_degrees, weights_bytes
from jaxserve.capacity.models import Model
from jaxserve.capacity.roofline import DecodeFloor, decode_floor
from jaxserve.capacity.targets import DEFAULT_GPU_FRACTION, Target
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError
from jaxserve.runtime.memory import PoolSize, available_ram
from jaxserve.runtime.planning import pool_size, resolve_dtype, smallest_plan, with_pool
from jaxserve.runtime.programs import EnginePlan, Program

Programs = Literal["none", "largest", "all"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What each device holds when the model is split over `degree` of them.

    Attributes:
        limit_bytes: what jax's allocator gives out.
        temp_bytes: temporaries of the largest step.
        slots_bytes: ids and sampling options of the running sequences.
        pool_bytes: the KV pool.
        num_pages, num_tokens: of the pool; a page is the same tokens on every device of the split.
        short_bytes: what is missing for one sequence of full length; 0: it fits.
        pool_reason: why the pool has its size, or what does not fit.
    """

    degree: int
    limit_bytes: int
    weights_bytes: int
    temp_bytes: int
    slots_bytes: int
    pool_bytes: int = 0
    num_pages: int = 0
    num_tokens: int = 0
    short_bytes: int = 0
    pool_reason: str = ""

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The answer. Bytes are of one device.

    Attributes:
        engine: what an engine on one device would be, with the shapes of its share of the model.
        shares: by degree of tensor parallelism, for every degree that divides the model and the target.
        share: the one that is suggested, the smallest degree that fits.
        replicas: engines of this degree that the target has devices for (data parallelism).
        compiled: by the target's compiler, with one device's shapes; empty where the numbers are estimates.
        compiler_missing: how to install the compiler, None if it is here.
        floors: of decode steps, of a whole replica.
    """

    model: Model
    target: Target
    dtype: str
    engine: EnginePlan
    shares: Sequence[Share]
    share: Share
    replicas: int
    full_length_sequences: int
    compiled: Sequence[jobs.Compiled] = ()
    compiler_missing: str | None = None
    floors: Sequence[DecodeFloor] = ()

    @property
    def temps_are_compiled(self) -> bool:
        return any(program.error is None and program.pool_bytes for program in self.compiled)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token in all layers, on each device."""
        config = self.engine.config
        return self.engine.pool_bytes // (config.num_pages * config.page_size)


def stand_in(target: Target, gpu_fraction: float = DEFAULT_GPU_FRACTION) -> Any:
    """What planning asks of a jax Device, from the data sheet."""
    if target.chip is None:
        return SimpleNamespace(platform="cpu", device_kind="cpu")
    device = SimpleNamespace(platform=target.platform, device_kind=target.chip.kind,
                             memory_stats=lambda: {"bytes_limit": target.usable_bytes(gpu_fraction)})
    if target.chip.cuda is not None:
        device.compute_capability = "{}.{}".format(*target.chip.cuda.capability)
    return device


def plan_capacity(model: Model, target: Target, config: EngineConfig, *, context: int | None = None,
                  batches: Sequence[int] = (), programs: Programs = "largest",
                  gpu_fraction: float = DEFAULT_GPU_FRACTION,
                  on_compiled: Callable[[jobs.Compiled], None] | None = None) -> Capacity:
    """Plans an engine for a target that need not be here.

    Args:
        context: tokens in the context of each sequence in the decode floors; default 1024, or max_model_len if less.
        batches: of the decode floors; default powers of four up to max_num_seqs, and that.
        programs: which of the engine's programs are compiled, if the target's compiler is installed: "largest": the
            largest decode step and the largest step of all.
        gpu_fraction: of a GPU's memory that jax's allocator gives out.
        on_compiled: called with each program as it is done.

    Raises:
        OutOfMemoryError: not even one sequence fits, on any number of the target's devices that the model can be
            split over; with the numbers.
        ConfigError: an option does not fit the model.
    """
    device = stand_in(target, gpu_fraction)
    dtype = resolve_dtype(config.dtype, model.dtype, device)
    missing = jobs.missing_compiler(target)
    compiled: list[jobs.Compiled] = []
    shares = []
    chosen = None
    for degree in tensor_degrees(model.spec, target.num_devices):
        plan = smallest_plan(share_of(model.spec, degree), dtype, config, model.spec.vocab_size, device)
        share = _share(model, plan, config, degree, plan.estimated_temp_bytes)
        if share.fits and chosen is None and missing is None and programs != "none":
            job = jobs.Job(target=target.name, config=model.config, dtype=dtype, options=dataclasses.asdict(config),
                           num_pages=share.num_pages, degree=degree,
                           programs=[str(program) for program in _choose(plan, programs)])
            compiled = []
            for program in jobs.run(job):
                compiled.append(program)
                if on_compiled is not None:
                    on_compiled(program)
            temps = [program.temp_bytes for program in compiled if program.error is None and program.pool_bytes]
            if temps:
                share = _share(model, plan, config, degree, max(temps))
        shares.append(share)
        if share.fits and chosen is None:
            chosen = share, plan
    if chosen is None:
        raise OutOfMemoryError(_too_large(model, target, shares[-1]))
    share, plan = chosen
    engine = with_pool(plan, PoolSize(num_pages=share.num_pages, reason=share.pool_reason))
    return Capacity(
        model=model, target=target, dtype=dtype, engine=engine, shares=shares, share=share,
        replicas=target.num_devices // share.degree,
        full_length_sequences=(share.num_pages - 1) // engine.config.max_pages_per_seq, compiled=compiled,
        compiler_missing=missing, floors=_floors(model, target, engine, dtype, share, context, batches))


def _share(model: Model, plan: EnginePlan, config: EngineConfig, degree: int, temp_bytes: int) -> Share:
    device: Any = plan.device
    limit = available_ram() if device.platform == "cpu" else device.memory_stats()["bytes_limit"]
    page_bytes = plan.pool_bytes // plan.config.num_pages
    weights = weights_bytes(model.spec, plan.params.embed.dtype.name, degree)
    try:
        size = pool_size(plan, config, device, weights_bytes=weights, step_temp_bytes=lambda: temp_bytes)
        num_pages, reason, short = size.num_pages, size.reason, 0
    except OutOfMemoryError as error:
        num_pages, reason, short = plan.config.max_pages_per_seq + 1, str(error), 1
    # The engine compares a pool whose size is set by hand with an accelerator's memory without the temporaries, for
    # which it would have to compile.
    short = max(weights + temp_bytes + plan.slots_bytes + num_pages * page_bytes - limit, short)
    return Share(degree=degree, limit_bytes=limit, weights_bytes=weights, temp_bytes=temp_bytes,
                 slots_bytes=plan.slots_bytes, pool_bytes=num_pages * page_bytes, num_pages=num_pages,
                 num_tokens=(num_pages - 1) * plan.config.page_size, short_bytes=short, pool_reason=reason)


def _choose(plan: EnginePlan, programs: Programs) -> Sequence[Program]:
    if programs == "all":
        return plan.programs
    decode = [bucket for bucket in plan.buckets if not bucket.prefill_rows]
    return [max(buckets, key=lambda bucket: bucket.num_tokens) for buckets in (decode, plan.buckets)]


def _too_large(model: Model, target: Target, least: Share) -> str:
    where = f"one device of {target.name}" if least.degree == 1 else f"each of {least.degree} devices of {target.name}"
    return (f"{model.description} does not fit: {where} would hold {_gib(least.weights_bytes)} of weights, "
            f"{_gib(least.temp_bytes)} of temporaries, {_gib(least.slots_bytes)} of the sequences' ids and options "
            f"and {_gib(least.pool_bytes)} of KV pool; {_gib(least.limit_bytes)} can be used, "
            f"{_gib(least.short_bytes)} too little; lower max_model_len, max_num_seqs or max_num_batched_tokens, or "
            f"take a larger target")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _floors(model: Model, target: Target, engine: EnginePlan, dtype: str, share: Share, context: int | None,
            batches: Sequence[int]) -> Sequence[DecodeFloor]:
    if target.chip is None:
        return ()
    config = engine.config
    if context is not None and context > config.max_model_len:
        raise ConfigError(f"context={context} is more than max_model_len={config.max_model_len}; give at most that, or "
                          f"raise max_model_len")
    context = context or min(1024, config.max_model_len)
    if not batches:
        batches = sorted({*(4**i for i in range(10) if 4**i < config.max_num_seqs), config.max_num_seqs})
    row_bytes = engine.pool_bytes / (model.spec.num_layers * config.num_pages * config.page_size)
    return [decode_floor(model.spec, dtype, target.chip, batch=batch, context=context, kv_row_bytes=row_bytes,
                         degree=share.degree) for batch in batches]
