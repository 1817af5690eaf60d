"""jaxserve: a functional inference engine for large language models in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineError,
    JaxserveError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
)
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings, StreamEvent
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.one_call import generate

__version__ = "0.1.0"

__all__ = ["LLM", "CheckpointError", "CompletionOutput", "ConfigError", "EngineClosedError", "EngineConfig",
           "EngineError", "JaxserveError", "Logprob", "OutOfMemoryError", "QueueFullError", "RequestError",
           "RequestOutput", "RequestTimings", "SamplingParams", "StreamEvent", "UnsupportedModelError", "generate"]


def __getattr__(name: str) -> Any:
    # jax takes a second to import; `jaxserve --help` and type checkers need not wait for it.
    if name == "LLM":
        from jaxserve.llm import LLM
        return LLM
    if name == "generate":
        from jaxserve.one_call import generate
        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
