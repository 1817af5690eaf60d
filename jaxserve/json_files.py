"""Reading the small text files around a checkpoint. They come from strangers: whatever is wrong with one is a
CheckpointError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        content = json.loads(read_text(path))
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is not JSON of a sane depth") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content
