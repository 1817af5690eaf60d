"""Errors that users meet. Each message names the value, the limit and what to do."""

from collections.abc import Iterable


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
    """The engine, or the client of one, has been closed, so it takes no more requests."""


def how_to_install(extra: str) -> str:
    """The command that adds one of our extras, as README.md has it: we are on no package index."""
    return f"pip install '.[{extra}]' in a clone of jaxserve"


def unknown_names(what: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """The message for names that do not exist: "unknown `what` x", with the nearest names that do, else all."""
    import difflib

    known, parts = sorted(known), []
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, n=2)
        parts.append(f"{name} (did you mean {' or '.join(near)}?)" if near else name)
    message = f"unknown {what} {', '.join(parts)}"
    return message if all("?" in part for part in parts) else f"{message}; known: {', '.join(known)}"
