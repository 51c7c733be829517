"""Converts an attrs class that decodes JSON to the JSON Schema of its input.

Types, validators, defaults and the rows of the table of request fields become keywords. Does not know any endpoint.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from attrs import define, field

from enginehouse.contract.rows import JsonSchema, Row, row_of
from enginehouse.settings.config import LimitsSettings

_PLAIN: dict[Any, JsonSchema] = {
    Any: {},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_BOUNDS = {">=": "minimum", "<=": "maximum", ">": "exclusiveMinimum", "<": "exclusiveMaximum"}


@define
class ClassSchemas:
    """Builds schemas of classes; nested ones become components.

    Attributes:
        limits: of the server; they bound some fields. None shows none of them.
        prefix: of the names of components, for the classes of a plugin. Their annotations may be any.
        components: name to schema; filled by the methods.
    """

    limits: LimitsSettings | None = None
    prefix: str = ""
    components: dict[str, JsonSchema] = field(factory=dict)

    def object_schema(self, cls: type[Any], *, drops_nulls: bool = True) -> JsonSchema:
        """Return the schema of one class.

        Args:
            drops_nulls: allow null for all optional members; otherwise only for those annotated so.
        """
        attrs.resolve_types(cls)
        schema: JsonSchema = {"type": "object", "description": _summary(cls), "properties": {}}
        required = []
        for attribute in attrs.fields(cls):
            row = row_of(attribute)
            value = self._value_schema(attribute.type, drops_nulls=drops_nulls and not row.keeps_nulls)
            value |= dict(_bounds(attribute.validator, value.get("type")))
            value = self._limited({**value, **row.schema}, row)
            if choices := attribute.metadata.get("choices"):
                value["enum"] = list(choices)
            if attribute.default is attrs.NOTHING:
                required.append(attribute.name)
            elif drops_nulls:
                value = _or_null(value)
            if row.text:
                value["description"] = row.text[0].upper() + row.text[1:]
            if _is_shown_default(attribute.default):
                value["default"] = attribute.default
            schema["properties"][attribute.name] = value
        if required:
            schema["required"] = required
        return schema

    def _limited(self, value: JsonSchema, row: Row) -> JsonSchema:
        """Return a field's schema with the limit of the server, if one bounds it."""
        keyword, name = row.limit or ("", "")
        limit = getattr(self.limits, name) if name and self.limits is not None else None
        if limit is None:
            return value
        if "anyOf" not in value:
            return {**value, keyword: limit}
        options = [{**one, keyword: limit} if one["type"] == "array" else one for one in value["anyOf"]]
        return {**value, "anyOf": options}

    def _value_schema(self, kind: Any, *, drops_nulls: bool) -> JsonSchema:  # noqa: PLR0911 - one per kind
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        arguments = get_args(kind)
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            return _any_of([self._value_schema(option, drops_nulls=drops_nulls) for option in arguments])
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        if origin in (tuple, list):
            return {"type": "array", "items": self._value_schema(arguments[0], drops_nulls=drops_nulls)}
        if origin is dict:
            values = self._value_schema(arguments[1], drops_nulls=drops_nulls)
            return {"type": "object", **({"additionalProperties": values} if values else {})}
        if attrs.has(kind):
            return self._reference(kind, drops_nulls)
        if self.prefix:
            return {}
        raise TypeError(f"no schema is known for {kind!r}")

    def _reference(self, cls: type[Any], drops_nulls: bool) -> JsonSchema:
        name = self.prefix + cls.__name__.removesuffix("Body")
        if name not in self.components:
            self.components[name] = {}  # a class may contain itself
            self.components[name] = self.object_schema(cls, drops_nulls=drops_nulls)
        return {"$ref": f"#/components/schemas/{name}"}


def _summary(cls: type[Any]) -> str:
    first, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    return re.sub(r"\s+", " ", first).replace("``", "`")


def _bounds(validator: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield keywords for attrs' own validators, at any nesting; ``kind`` is the type of the value."""
    if (operator := getattr(validator, "compare_op", None)) in _BOUNDS:
        yield _BOUNDS[operator], validator.bound
    if (options := getattr(validator, "options", None)) is not None:
        yield "enum", list(options)
    for name in ("min", "max"):
        if (length := getattr(validator, f"{name}_length", None)) is not None:
            yield f"{name}{'Items' if kind == 'array' else 'Length'}", length
    inner = getattr(validator, "validator", None)
    for part in (*getattr(validator, "_validators", ()), *((inner,) if inner is not None else ())):
        yield from _bounds(part, kind)


def _any_of(options: list[JsonSchema]) -> JsonSchema:
    """Return a union; plain types are listed in one ``type``."""
    others = [option for option in options if option != {"type": "null"}]
    has_null = len(others) < len(options)
    schema = others[0] if len(others) == 1 else {"anyOf": others}
    return _or_null(schema) if has_null else schema


def _or_null(schema: JsonSchema) -> JsonSchema:
    if not schema:
        return schema
    if "enum" in schema or "$ref" in schema or "anyOf" in schema or "oneOf" in schema:
        options = schema.get("anyOf", [schema]) if set(schema) <= {"anyOf"} else [schema]
        return schema if {"type": "null"} in options else {"anyOf": [*options, {"type": "null"}]}
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return schema if not kinds or "null" in kinds else {**schema, "type": [*kinds, "null"]}


def _is_shown_default(default: Any) -> bool:
    """Return True if a default is informative; factories, empty texts and classes are not."""
    return isinstance(default, bool | int | float | str) and default != ""
