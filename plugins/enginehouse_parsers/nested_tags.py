"""Values that are nested between tags, as MiniMax M3 writes lists and objects; each tag has a prefix."""

from __future__ import annotations

import re
from typing import Any

from enginehouse_parsers.json_schemas import types_of
from enginehouse_parsers.value_writer import read_json

__all__ = ["read_nested"]

_ITEM = "item"
_MAX_DEPTH = 50


def read_nested(text: str, prefix: str, schema: Any, depth: int = 0) -> Any:
    """Return the value of a text: a list of its ``item`` tags, an object of other tags, or a value without tags.

    Args:
        prefix: text before each tag.
        schema: schema of the value; values without tags are texts unless it says otherwise.
    """
    schema = schema if isinstance(schema, dict) else {}
    found = re.search(rf"{re.escape(prefix)}<([^<>/][^<>]*)>", text)
    if found is None or depth > _MAX_DEPTH:
        return _plain(text, schema)
    names: list[str] = []
    values: list[Any] = []
    while found is not None:
        name, end_tag = found[1], f"{prefix}</{found[1]}>"
        end = _end_of(text, found.end(), f"{prefix}<{name}>", end_tag)
        inner = schema.get("items") if name == _ITEM else (schema.get("properties") or {}).get(name)
        names.append(name)
        values.append(read_nested(text[found.end() : end], prefix, inner, depth + 1))
        found = re.compile(rf"{re.escape(prefix)}<([^<>/][^<>]*)>").search(text, end + len(end_tag))
    if set(names) == {_ITEM} and schema.get("type") != "object":
        return values
    return dict(zip(names, values, strict=True))


def _end_of(text: str, position: int, start_tag: str, end_tag: str) -> int:
    """Return where the end tag of the innermost open tag begins, or the end of the text."""
    depth = 1
    while depth:
        end = text.find(end_tag, position)
        if end < 0:
            return len(text)
        start = text.find(start_tag, position, end)
        depth, position = (depth + 1, start + len(start_tag)) if start >= 0 else (depth - 1, end + len(end_tag))
    return position - len(end_tag)


def _plain(text: str, schema: dict[str, Any]) -> Any:
    types = types_of(schema, schema)
    if "type" not in schema or "string" in types:
        return text
    try:
        return read_json(text)
    except ValueError:
        return text
