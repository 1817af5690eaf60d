"""Errors that users meet. Each message names the value, the limit and what to do."""


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An engine or model option is wrong, or options contradict each other."""


class RequestError(JaxserveError, ValueError):
    """One request is invalid. It fails alone; other requests are not disturbed.

    Attributes:
        param: the name of the offending field, for servers that report it, or None.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class QueueFullError(JaxserveError):
    """The waiting queue is at its bound; try again later."""


class CheckpointError(JaxserveError, ValueError):
    """A checkpoint is incomplete, has tensors of the wrong shape, or is of an unknown kind."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is well formed, but asks for something that jaxserve does not implement."""


class OutOfMemoryError(JaxserveError, MemoryError):
    """The weights or the page pool do not fit; the message says by how much."""


class EngineError(JaxserveError, RuntimeError):
    """The engine itself failed. `__cause__` holds the original exception."""


class EngineClosedError(EngineError):
    """The engine has been closed, so it takes no more requests."""
