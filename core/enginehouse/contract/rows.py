"""Rows of the table of request fields: what is known about one field, and how it is looked up.

A row is an attribute of an attrs class, written with :func:`row`. Its annotation and default decode a value, its bounds
validate it, and its :class:`Row` holds the rest. The rows of core are in :mod:`enginehouse.contract.fields`; plugins
declare theirs as an attrs class, with the metadata ``description``. Does not know any field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, le, optional

__all__ = [
    "INT64_MAX",
    "JsonSchema",
    "RequestField",
    "Row",
    "classes_of",
    "details_class",
    "fields_of",
    "int64",
    "row",
    "row_of",
]

JsonSchema = dict[str, Any]
"""A JSON Schema as Python values."""

INT64_MAX = 2**63 - 1
"""Largest signed integer of 64 bits."""

int64 = and_(ge(-INT64_MAX - 1), le(INT64_MAX))
"""Validator of integers that are sent to a worker."""


@frozen(kw_only=True)
class Row:
    """The part of a row that is not its name, type, default and validator.

    Attributes:
        text: effect of the field in one or two sentences, for the API document.
        by: rule that decides whether a model honours the field, a key of the rules in ``pipeline.capabilities``.
        kinds: constraint kinds; an engine honours the field if it enforces one of them. Only for the rule
            ``constraint``.
        member: place of the value in :class:`.GenerateRequest`, such as ``thinking.budget``,
            from which it can be removed; "" if no model lacks the field or nothing could be answered without it.
        prompt: ``template`` if only chat templates and their parsers read the field, ``shapes`` if the prompt of a chat
            depends on it otherwise.
        step: core's sampling step that the field controls, if any.
        schema: keywords of the JSON Schema that the annotation does not express.
        limit: keyword of the JSON Schema, and the attribute of the server's limits that it takes.
        off: values that have no effect, so that endpoints without this field accept them.
        keeps_nulls: null inside the value is data, not an absent member.
    """

    text: str = ""
    by: str = "server"
    kinds: tuple[str, ...] = ()
    member: str = ""
    prompt: Literal["", "shapes", "template"] = ""
    step: str = ""
    schema: JsonSchema = field(factory=dict)
    limit: tuple[str, str] | None = None
    off: tuple[Any, ...] = ()
    keeps_nulls: bool = False


def row(
    text: str = "",
    *,
    default: Any = None,
    bounds: tuple[float | None, float | None] = (None, None),
    check: Callable[..., Any] | None = None,
    **known: Any,
) -> Any:
    """Return an attrs attribute that is a row of the table.

    Args:
        text: effect of the field.
        default: value if the field is not given; ``attrs.NOTHING`` makes the field required.
        bounds: lower and upper bound, inclusive; None means unbounded.
        check: a further attrs validator; not called with None.
        known: the other attributes of :class:`Row`.
    """
    least, most = bounds
    validators: list[Any] = [
        *([] if least is None else [ge(least)]),
        *([] if most is None else [le(most)]),
        *([] if check is None else [check]),
    ]
    return field(
        default=default,
        validator=optional(validators) if validators and default is None else validators or None,
        metadata={"row": Row(text=text, **known)},
    )


def row_of(attribute: attrs.Attribute[Any]) -> Row:
    """Return the row of an attribute; for one that a plugin declared, a row with its description."""
    found = attribute.metadata.get("row")
    return found if isinstance(found, Row) else Row(text=attribute.metadata.get("description", ""), by="plugin")


@frozen
class RequestField:
    """A request field that a plugin declared.

    Attributes:
        name: the field in the request body.
        owner: name of the plugin object that uses it; the key of its fields in ``GenerateRequest.extensions``.
        plugin: name of the plugin that registered the object.
        attribute: its type, default and validator.
        declared_by: the attrs class with all fields of the owner.
        is_sampled: a sampler uses it, in the engine; False for a preparer's field, which does not reach the engine.
    """

    name: str
    owner: str
    plugin: str
    attribute: attrs.Attribute[Any]
    declared_by: type[Any]
    is_sampled: bool = True


def fields_of(fields_class: type[Any], owner: str, plugin: str, *, is_sampled: bool = True) -> list[RequestField]:
    """Return the request fields that ``fields_class`` declares.

    Raises:
        ValueError: it is not an attrs class, or an attribute has no default (the default means "off").
    """
    if not attrs.has(fields_class):
        raise ValueError("request_fields must be an attrs class")
    attrs.resolve_types(fields_class)
    for attribute in attrs.fields(fields_class):
        if attribute.default is attrs.NOTHING:
            raise ValueError(f"the request field {attribute.name!r} needs a default that means off")
    return [
        RequestField(attribute.name, owner, plugin, attribute, fields_class, is_sampled)
        for attribute in attrs.fields(fields_class)
    ]


def classes_of(fields: Iterable[RequestField]) -> Mapping[str, type[Any]]:
    """Return the attrs classes that declare these fields, by owner."""
    return {declared.owner: declared.declared_by for declared in fields}


def details_class(kind: Any) -> type[Any] | None:
    """Return the class in ``bool | SomeAttrsClass | None``, the type of a switch with details; None for other types."""
    options = get_args(kind)
    return next(filter(attrs.has, options), None) if bool in options else None
