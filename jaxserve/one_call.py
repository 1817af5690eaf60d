"""`jaxserve.generate`: a model's name and prompts in one call, on an engine that is kept for the next."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.processor import Prompt
from jaxserve.errors import ConfigError, unknown_names
from jaxserve.inputs import one_params
from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams


def generate(model: str | PathLike[str], prompts: Prompt | Iterable[Prompt], *,
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True,
             **options: Any) -> list[RequestOutput]:
    """Loads a model and generates, in one call. The engine is kept for the next call with the same model
    and engine options, so a second notebook cell starts at once; another model replaces it.

    Calls may come from several threads: those for the kept engine run together, one for another model waits until
    they have ended, because two models at once might not fit into memory. To alternate between models, keep an
    `LLM` for each.

    Args:
        model: see LLM.
        prompts: see LLM.generate.
        options: engine options (EngineConfig) and sampling options (SamplingParams) by name. `seed` is the
            request's.

    Raises:
        ConfigError: an option does not exist. Otherwise as LLM and LLM.generate.
    """
    engine_names = EngineConfig.__dataclass_fields__.keys() - SamplingParams.__dataclass_fields__.keys()
    engine_options = {name: options.pop(name) for name in list(options) if name in engine_names}
    sampling_names = SamplingParams.__dataclass_fields__.keys()
    if unknown := options.keys() - sampling_names:
        raise ConfigError(unknown_names("option(s)", unknown, engine_names | sampling_names))
    EngineConfig.from_options(engine_options)
    if sampling_params is None or options:
        sampling_params = one_params(sampling_params, options)
    lease = threading.Lock()
    lease.acquire()
    try:
        llm = _kept.take(lease, model, engine_options)
        return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)
    finally:
        # Python looks for an interrupt after calls and as a function begins. There is neither before this one, so it
        # is made however the block has ended; within a context manager there would be.
        lease.release()


class _KeptEngine:
    """The engine of the last call, and the leases of the calls that use it.

    A lease is a lock that a call holds until it ends. Bare locks alone: an interrupt cannot leave them half done, as it
    can a Condition.
    """

    def __init__(self) -> None:
        self._entry = threading.Lock()  # whoever waits for the engine to be idle keeps newcomers from using it
        self._leases: list[threading.Lock] = []
        self._key: Any = None
        self._llm: LLM | None = None

    def take(self, lease: threading.Lock, model: str | PathLike[str], options: dict[str, Any]) -> LLM:
        """The engine for a model and engine options, made if it is not the kept one. It is not closed until `lease`,
        which the caller holds, is released."""
        key = (str(model), tuple(sorted(options.items())))
        with self._entry:
            # No comprehension: an interrupt within one can leave a `with` of Python 3.12 without unlocking.
            self._leases = list(filter(operator.methodcaller("locked"), self._leases))
            llm = self._llm
            if llm is None or llm.closed or self._key != key:
                for other in self._leases:
                    with other:  # waits for its call's end
                        pass
                self.close()
                llm = LLM(model, **options)
                self._key, self._llm = key, llm
            self._leases.append(lease)
        return llm

    def close(self) -> None:
        """Closes the kept engine, whether it is in use or not."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None


_kept = _KeptEngine()
