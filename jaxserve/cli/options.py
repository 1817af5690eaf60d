"""Command line options made from the fields of a dataclass: EngineConfig, SamplingParams and ServeConfig.

An option exists because the dataclass has the field: name, type, default and help text come from there, so
the command line can neither miss an option nor name one differently. `--max-model-len` and
`--max_model_len` are the same (see `main.CONTEXT_SETTINGS`).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

import click

from jaxserve.config import EngineConfig
from jaxserve.field_docs import field_docs
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.config import ServeConfig


class IdValue(click.ParamType):
    """`ID=VALUE`, one entry of a mapping from token id to number."""

    name = "ID=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token_id, separator, number = str(value).partition("=")
        try:
            if not separator:
                raise ValueError
            return int(token_id), float(number)
        except ValueError:
            self.fail(f"{value!r} is not ID=VALUE, for example 17=-100", param, ctx)


class FiniteRange(click.FloatRange):
    """A range that nan, which compares with nothing, and infinity are not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def _click_type(annotation: Any) -> tuple[Any, bool]:
    """The click type of a field's annotation, and whether the option is repeatable."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        # `str | Sequence[str]` is one repeatable option.
        annotation = members[-1]
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return click.Choice(typing.get_args(annotation)), False
    if origin is collections.abc.Mapping:
        return IdValue(), True
    if origin is collections.abc.Sequence:
        return typing.get_args(annotation)[0], True
    return annotation, False


_SECTIONS = {SamplingParams: "Sampling options", ServeConfig: "Server options", EngineConfig: "Engine options"}


class DataclassOption(click.Option):
    """An option made from a field; `section` is its heading in the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help lists its own options first, then those of each dataclass under a heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            section = param.section if isinstance(param, DataclassOption) else "Options"
            line = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if line is not None:
                sections.setdefault(section, []).append(line)
        for section in sorted(sections, key=lambda name: name != "Options"):
            with formatter.section(section):
                formatter.write_dl(sections[section])


def _option(cls: type, field: dataclasses.Field, annotation: Any, help_text: str) -> Callable[[Callable], Callable]:
    name = field.name.replace("_", "-")
    kind, multiple = _click_type(annotation)
    flags = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    # Not given is None: only what the user typed is passed on, so the dataclass' own default holds.
    if field.default not in (None, ()):
        default = ("on" if field.default else "off") if kind is bool else field.default
        help_text = f"{help_text.rstrip('.')}. Default {default}."
    if multiple:
        help_text += " Repeatable."
    return click.option(flags, _key(cls, field), cls=DataclassOption, section=_SECTIONS[cls], type=kind,
                        multiple=multiple, default=None, help=help_text[0].upper() + help_text[1:])


def _key(cls: type, field: dataclasses.Field) -> str:
    """The option's keyword argument: two dataclasses may have a field of the same name (`seed`)."""
    return f"{cls.__name__}__{field.name}".lower()


def options_of(cls: type, *, without: Collection[str] = ()) -> Callable[[Callable], Callable]:
    """A decorator that adds one option for each field of `cls` to a click command, but for `without`."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)

    def decorate(command: Callable) -> Callable:
        for field in reversed(dataclasses.fields(cls)):
            if field.name not in without:
                command = _option(cls, field, hints[field.name], docs[field.name])(command)
        return command

    return decorate


def given(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of `cls` that the user gave, of a command's keyword arguments."""
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = options.get(_key(cls, field))
        if value is not None and value != ():
            is_mapping = isinstance(value, tuple) and isinstance(value[0], tuple)
            chosen[field.name] = dict(value) if is_mapping else value
    return chosen
