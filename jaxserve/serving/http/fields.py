"""What a field of a request may hold. One table of fields reads a body and describes it in the OpenAPI document.

Every field is taken or refused: none is ignored by accident.
"""

from __future__ import annotations

import collections.abc
import contextlib
import gc
import json
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from jaxserve.field_docs import field_docs
from jaxserve.sampling_params import INT32_MAX, MAX_ABS_LOGIT_BIAS, RANGES, SamplingParams, shortened
from jaxserve.serving.http.errors import invalid

Schema = dict[str, Any]

_LARGE = 1 << 20

_collection_lock = threading.Lock()
_without_collection = 0  # uses of _no_collection at the moment
_collected_before = True


def parse_json(body: bytes | bytearray | str) -> Any:
    """Raises ApiError (400)."""
    try:
        with _no_collection() if len(body) > _LARGE else contextlib.nullcontext():
            return json.loads(body, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nobody else runs while JSON is read, and of millions of lists the collector would make seconds (3.4 s instead of
    0.4 s for 15 MB of them), for nothing: JSON has no cycles."""
    global _without_collection, _collected_before
    with _collection_lock:  # batches read JSON in one thread, bodies come in another
        if _without_collection == 0:
            _collected_before = gc.isenabled()
            gc.disable()
        _without_collection += 1
    try:
        yield
    finally:
        with _collection_lock:
            _without_collection -= 1
            if _without_collection == 0 and _collected_before:
                gc.enable()


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True)
class Kind:
    """A set of JSON values.

    Attributes:
        schema: it, as JSON Schema 2020-12. Every value that it does not admit is refused; of those that it admits
            some may be refused too, where a rule cannot be said there or depends on the model.
        read: (the field's name, a value) -> the value to work with. Raises ApiError (400).
    """

    schema: Schema
    read: Callable[[str, Any], Any]


def simple(schema: Schema, expected: str, fits: Callable[[Any], bool]) -> Kind:
    """The values that `fits` admits. `expected`: the end of "NAME must be"."""
    def read(name: str, value: Any) -> Any:
        if not fits(value):
            raise invalid(f"{name} must be {expected}, got {shortened(value)}", name)
        return value

    return Kind(schema, read)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int = INT32_MAX) -> Kind:
    return simple({"type": "integer", "minimum": low, "maximum": high}, f"an integer from {low} to {high}",
                  lambda value: is_integer(value) and low <= value <= high)


def choice(*allowed: str) -> Kind:
    return simple({"type": "string", "enum": list(allowed)}, f"one of {', '.join(allowed)}",
                  lambda value: isinstance(value, str) and value in allowed)


FLAG = simple({"type": "boolean"}, "true or false", lambda value: isinstance(value, bool))
TEXT = simple({"type": "string"}, "a text", lambda value: isinstance(value, str))
OBJECT = simple({"type": "object"}, "an object", lambda value: isinstance(value, dict))
LABELS = simple({"type": "object", "additionalProperties": {"type": "string"}}, "an object of texts",
                lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()))


def list_of(kind: Kind, *, least: int = 0) -> Kind:
    """Messages name the place: `NAME[2]`."""
    def read(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise invalid(f"{name} must be a list{' with at least one item' if least else ''}, got "
                          f"{shortened(value)}", name)
        return [kind.read(f"{name}[{i}]", item) for i, item in enumerate(value)]

    return Kind({"type": "array", "items": kind.schema} | ({"minItems": least} if least else {}), read)


def text_or_list_of(kind: Kind) -> Kind:
    """The list has at least one item."""
    items = list_of(kind, least=1)

    def read(name: str, value: Any) -> str | list[Any]:
        if not isinstance(value, str | list):
            raise invalid(f"{name} must be a text or a list, got {shortened(value)}", name)
        return value if isinstance(value, str) else items.read(name, value)

    return Kind({"anyOf": [TEXT.schema, items.schema]}, read)


def not_implemented(*neutral: Any, why: str = "") -> Field:
    """A field of the API that has no meaning here, but for values that ask for nothing."""
    def read(name: str, value: Any) -> None:
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            allowed = ", or give " + " or ".join(json.dumps(allowed) for allowed in neutral) if neutral else ""
            raise invalid(f"{name} is not implemented{why and f' ({why})'}, got {shortened(value)}; leave it out"
                          f"{allowed}", name)

    return Field(Kind({"enum": list(neutral)} if neutral else {"type": "null"}, read), "Not implemented.")


@dataclass(frozen=True)
class Field:
    """A field that may be left out, unless it is `required`; null is the same. `default`: what is read then."""

    kind: Kind
    doc: str
    default: Any = None
    required: bool = False


class Table:
    """The fields of a JSON object."""

    def __init__(self, name: str, *groups: Mapping[str, Field]):
        self.name = name
        self.fields = {name: field for group in groups for name, field in group.items()}

    def read(self, body: Any, place: str = "") -> dict[str, Any]:
        """Every field of the table with its value or default. `place`: of an object inside a body, its field's name.

        Raises ApiError (400), naming the field.
        """
        if not isinstance(body, dict):
            raise invalid(f"{place or 'the body'} must be a JSON object", place or None)
        values = {name: field.default for name, field in self.fields.items()}
        for name, value in body.items():
            full = f"{place}.{name}" if place else name
            if name not in self.fields:
                raise invalid(f"unknown field {shortened(full)}", full[:80])
            if value is not None:
                values[name] = self.fields[name].kind.read(full, value)
        for name, field in self.fields.items():
            if field.required and body.get(name) is None:
                raise invalid(f"{f'{place}.' if place else ''}{name} is required", f"{place}.{name}" if place else name)
        return values

    @property
    def kind(self) -> Kind:
        """Objects of this table as the values of a field."""
        return Kind(self.schema, lambda name, value: self.read(value, name))

    @property
    def schema(self) -> Schema:
        required = [name for name, field in self.fields.items() if field.required]
        return {"type": "object", "additionalProperties": False,
                "properties": {name: _property(field) for name, field in self.fields.items()},
                **({"required": required} if required else {})}


def _property(field: Field) -> Schema:
    schema = field.kind.schema if field.required else nullable(field.kind.schema)
    default = {} if field.default is None else {"default": field.default}
    return schema | {"description": field.doc[:1].upper() + field.doc[1:]} | default


def nullable(schema: Schema) -> Schema:
    match schema:
        case {"enum": values}:
            types_ = {"type": [schema["type"], "null"]} if "type" in schema else {}
            return schema | types_ | {"enum": [*values, None]}
        case {"type": str(name)}:
            return schema if name == "null" else schema | {"type": [name, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


# -- the fields of SamplingParams, whose values it checks itself


def _sampling_fields() -> dict[str, Field]:
    hints, docs = typing.get_type_hints(SamplingParams), field_docs(SamplingParams)
    return {field.name: Field(_sampling_kind(field.name, hints[field.name]), docs[field.name])
            for field in fields(SamplingParams) if field.name != "detokenize"}  # an answer without text is none


def _sampling_kind(name: str, annotation: Any) -> Kind:
    return Kind(_schema_of(name, annotation), _token_ids_as_keys if name == "logit_bias" else lambda _, value: value)


def _schema_of(name: str, annotation: Any) -> Schema:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        schemas = [_schema_of(name, member) for member in typing.get_args(annotation) if member is not type(None)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if annotation in (int, float):
        low, high = RANGES[name]
        return {"type": "integer" if annotation is int else "number", "minimum": low, "maximum": high}
    if annotation is bool:
        return FLAG.schema
    if annotation is str:
        return {"type": "string", "minLength": 1}
    if typing.get_origin(annotation) is collections.abc.Mapping:
        return {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": {
            "type": "number", "minimum": -MAX_ABS_LOGIT_BIAS, "maximum": MAX_ABS_LOGIT_BIAS}}
    item, = typing.get_args(annotation)  # of a Sequence
    return {"type": "array", "items": {"type": "string", "minLength": 1} if item is str else
            {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}


def _token_ids_as_keys(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid(f"the keys of {name} must be token ids, got {shortened(key)}", name)
    by_id = {int(key): bias for key, bias in value.items()}
    if len(by_id) < len(value):
        raise invalid(f"{name} names a token id more than once", name)
    return by_id


SAMPLING = _sampling_fields()


def sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a table has read, the fields of SamplingParams that were given."""
    return {name: values[name] for name in SAMPLING if values.get(name) is not None}
