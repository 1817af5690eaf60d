"""The documentation of a dataclass' fields, for those who show it elsewhere: the command line, the OpenAPI document."""

from __future__ import annotations

import inspect
import re


def field_docs(cls: type) -> dict[str, str]:
    """The texts of the "Attributes:" section of a dataclass' docstring, by field name."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
    section = re.split(r"\n(?=\S)", section)[0]  # what is not indented does not belong to it
    docs: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?=\w)", section):
        names, _, text = entry.partition(":")
        for name in names.split(","):
            docs[name.strip()] = " ".join(text.split())
    return docs
