"""Engine options: the one place where an option is named, documented and validated."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxserve.errors import ConfigError, unknown_names

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
# As kernels_pallas.Backend, which cannot be imported here without jax.
AttentionBackend = Literal["auto", "reference", "xla", "cpu_native", "mosaic_gpu", "mosaic_tpu"]
CompileMode = Literal["lazy", "eager"]
SchedulingPolicy = Literal["fcfs", "priority"]

# What counts, beside the memory that planning looks at. A prompt and its continuation are two tokens at least; the
# sampler's random numbers are apart for positions below 2**20; page ids of all layers must be 32 bit integers, and
# page 0 is reserved.
_BOUNDS = {"max_model_len": (2, 1 << 20), "max_num_seqs": (1, 1 << 16), "max_num_batched_tokens": (1, 1 << 20),
           "num_pages": (2, 1 << 24), "decode_steps": (1, 256)}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. None means: chosen at start from the model and the device, and logged.

    Attributes:
        max_model_len: most tokens of prompt and output together (2 to 1048576). Default: the model's own limit,
            but at most 8192.
        max_num_seqs: most sequences that run at once (the decode batch; at most 65536). Default 32 on CPU, 256 on
            accelerators.
        max_num_batched_tokens: token budget of one step (at most 1048576). Default 512 on CPU, 2048 on accelerators.
        max_waiting_requests: bound of the waiting queue; more raise QueueFullError. Sequences of a
            blocking `generate` call are fed in as room appears, so lists of any length work.
        page_size: tokens in one KV page (a power of two, 8 to 256). Default 64 on CPU, where the attention
            loop works through whole pages, 16 on accelerators.
        num_pages: pages in the KV pool (2 to 16777216); default from memory (see `kv_cache_memory_fraction`).
        kv_cache_memory_bytes: size of the KV pool in bytes, instead of `num_pages`. What the running sequences do not
            use of it keeps prefixes.
        kv_cache_memory_fraction: share of the free RAM that the pool may take on CPU, never more than
            what `max_num_seqs` full-length sequences can use, nor than `CPU_POOL_LIMIT_BYTES`.
        enable_prefix_caching: reuse the KV pages of equal prompt prefixes.
        dtype: of weights and activations. "auto": see docs/models.md.
        kv_cache_dtype: of K and V in the pool. "auto": as `dtype`. "int8" and "fp8" keep a scale for each token and
            head beside them, and take about a quarter of float32's memory; see docs/models.md for what they cost.
        attention_backend: "auto" takes the fastest that the device and the model allow. Others are refused where
            they cannot run.
        seed: base of the seeds given to requests without one. None: from the operating system.
        scheduling_policy: "fcfs" or "priority" (lower `priority` first, ties by arrival).
        decode_steps: decode steps in one launch when nothing is being prefilled (at most 256).
        compile_mode: "lazy" compiles the shapes that are met, "eager" all of them at start.
        deterministic: one prefill shape and one decode shape, so that a request's ids and logprobs are
            bitwise equal whatever runs beside it.
        max_logprobs: most `logprobs`/`prompt_logprobs` that a request may ask for.
        use_generation_config: take sampling defaults from the checkpoint's generation_config.
        compilation_cache_dir: where XLA keeps compiled programs. None: the directory that jax is configured with,
            else one in the user's cache directory; "" leaves jax as it is configured, by default without a cache.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_waiting_requests: int = 1024
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_fraction: float = 0.3
    enable_prefix_caching: bool = True
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    attention_backend: AttentionBackend = "auto"
    seed: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    decode_steps: int = 1
    compile_mode: CompileMode = "lazy"
    deterministic: bool = False
    max_logprobs: int = 20
    use_generation_config: bool = True
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        def positive(name: str) -> None:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")

        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting_requests",
                     "page_size", "num_pages", "kv_cache_memory_bytes", "decode_steps"):
            positive(name)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        if self.page_size is not None and (not 8 <= self.page_size <= 256 or self.page_size & (self.page_size - 1)):
            raise ConfigError(f"page_size must be a power of two from 8 to 256, got {self.page_size}")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("give num_pages or kv_cache_memory_bytes, not both")
        fraction = self.kv_cache_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 < fraction <= 0.95:
            raise ConfigError(f"kv_cache_memory_fraction must be a number in (0, 0.95], got {fraction!r}")
        for name in ("enable_prefix_caching", "deterministic", "use_generation_config"):
            if not isinstance(getattr(self, name), bool):  # "no" would count as true
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if self.compilation_cache_dir is not None and not isinstance(self.compilation_cache_dir, str | os.PathLike):
            raise ConfigError(f"compilation_cache_dir must be a path, got {self.compilation_cache_dir!r}")
        for name, choices in (("dtype", Dtype), ("kv_cache_dtype", KvCacheDtype),
                              ("attention_backend", AttentionBackend), ("scheduling_policy", SchedulingPolicy),
                              ("compile_mode", CompileMode)):
            allowed = get_args(choices)
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be an integer >= 0, got {self.max_logprobs!r}")
        if self.deterministic and self.decode_steps != 1:
            raise ConfigError("deterministic=True needs decode_steps=1: its one decode shape is a single step")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Builds a config from keyword options; unknown names raise ConfigError with the nearest known ones."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(unknown_names("option(s)", unknown, known))
        return cls(**options)


DEFAULT_MAX_MODEL_LEN = 8192
CPU_POOL_LIMIT_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig after model and device are known: nothing is None any more. Internal.

    `query_block`: prefill chunks are laid out in blocks of this many rows, so a chunk costs its length
    rounded up to it in the step's budget. `vocab_size`: rows of the embedding, padding included.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_requests: int
    page_size: int
    num_pages: int
    enable_prefix_caching: bool
    scheduling_policy: SchedulingPolicy
    decode_steps: int
    deterministic: bool
    max_logprobs: int
    query_block: int
    vocab_size: int

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)
