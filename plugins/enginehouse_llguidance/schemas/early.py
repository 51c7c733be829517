"""Rewrites what drafts 3 and 4 write in another way than draft 2020-12: OpenAPI 3.0 and many older tools still do.

An exclusive bound is a flag beside the bound, ``required`` is a flag of a property, a type may be ``any`` or a schema;
``divisibleBy``, ``extends`` and ``disallow`` have other names. Rewritten schemas keep their places.
"""

from __future__ import annotations

import re
from typing import Any

from enginehouse.contract.schema_keywords import SUBSCHEMAS
from enginehouse_llguidance.schemas.numbers import is_number

__all__ = ["MALFORMED", "modernized"]

MALFORMED = {
    "disallow": "must be a type or a list of types and schemas",
    "divisibleBy": "must be a number",
    "extends": "must be a schema or a list of schemas",
}
"""Keywords that are only left where their value is wrong, and what is wrong."""

_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_FORMATS = {"host-name": "hostname", "ip-address": "ipv4"}
_COLORS = "aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange|purple|red|silver|teal|white|yellow"
_FORMATS_OF_DRAFT_3 = {
    "time": "^(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$",
    "color": f"^(?:#[0-9A-Fa-f]{{6}}|{_COLORS})$",
}
_DIALECT = re.compile(r"/draft-0([34])/")


def modernized(root: Any) -> Any:
    """Return a schema as draft 2020-12 writes it; what is malformed stays as it is."""
    dialect = root.get("$schema") if isinstance(root, dict) else None
    found = _DIALECT.search(dialect) if isinstance(dialect, str) else None
    return _modernized(root, int(found[1]) if found else None)


def _modernized(value: Any, draft: int | None) -> Any:
    """Return a schema, or a value that may contain some that are referred to."""
    if isinstance(value, list):
        return [_modernized(one, draft) for one in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, member in value.items():
        if SUBSCHEMAS.get(key) == "named" and isinstance(member, dict):
            found[key] = {name: _modernized(one, draft) for name, one in member.items()}
        else:
            found[key] = member if key in _VALUES else _modernized(member, draft)
    if draft is not None and isinstance(found.get("id"), str):
        found.setdefault("$id", found.pop("id"))
    _rewrite_format(found, draft)
    _rewrite_bounds(found)
    _rewrite_required(found)
    _rewrite_types(found)
    _rewrite_names(found)
    return found


def _rewrite_format(schema: dict[str, Any], draft: int | None) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    schema["format"] = _FORMATS.get(name, name)
    if draft == 3 and name in _FORMATS_OF_DRAFT_3:
        del schema["format"]
        _add(schema, {"pattern": _FORMATS_OF_DRAFT_3[name]})


def _rewrite_bounds(schema: dict[str, Any]) -> None:
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if not isinstance(schema.get(exclusive), bool):
            continue
        if schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)


def _rewrite_required(schema: dict[str, Any]) -> None:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    flags = {name: one.pop("required") for name, one in properties.items() if _is_flagged(one)}
    required, names = schema.get("required", []), [name for name, is_required in flags.items() if is_required]
    if names and isinstance(required, list):
        schema["required"] = [*required, *names]


def _is_flagged(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("required"), bool)


def _rewrite_types(schema: dict[str, Any]) -> None:
    found = _of_types(schema["type"]) if "type" in schema else None
    if found is not None:
        del schema["type"]
        _add(schema, found)
    if isinstance(schema.get("disallow"), str | list):
        disallowed = schema.pop("disallow")
        excluded = _of_types(disallowed)
        _add(schema, {"not": {"type": disallowed} if excluded is None else excluded})


def _of_types(types: Any) -> Any:
    """Return a schema for types that may be ``any`` or schemas; None if the keyword ``type`` says the same."""
    named = types if isinstance(types, list) else [types]
    if "any" in named:
        return {}
    if not any(isinstance(one, dict) for one in named):
        return None
    plain = [one for one in named if not isinstance(one, dict)]
    return {"anyOf": [*([{"type": plain}] if plain else []), *(one for one in named if isinstance(one, dict))]}


def _rewrite_names(schema: dict[str, Any]) -> None:
    if is_number(schema.get("divisibleBy")):
        _add(schema, {"multipleOf": schema.pop("divisibleBy")})
    extended = schema.get("extends")
    extended = [extended] if isinstance(extended, dict) else extended
    if isinstance(extended, list) and all(isinstance(one, dict) for one in extended):
        del schema["extends"]
        for one in extended:
            _add(schema, one, is_beside=False)


def _add(schema: dict[str, Any], other: dict[str, Any], *, is_beside: bool = True) -> None:
    """Add keywords to a schema, or a schema to ``allOf`` if it has one of them."""
    if is_beside and schema.keys().isdisjoint(other):
        schema |= other
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append(other)
