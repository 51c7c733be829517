"""Takes definitions that no value satisfies out of a prepared schema: the library refuses schemas that refer to one,
also where no value is needed.
"""

from __future__ import annotations

from typing import Any

from enginehouse.contract.schema_keywords import SUBSCHEMAS

__all__ = ["without_definition"]


def without_definition(schema: Any, name: str) -> Any:
    """Return a prepared schema in which each reference to a definition is ``false``."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") == f"#/$defs/{name}":
        return False
    return {key: _member(key, value, name) for key, value in schema.items()}


def _member(key: str, value: Any, name: str) -> Any:
    holds = SUBSCHEMAS.get(key)
    if holds is None:
        return value
    if isinstance(value, list):
        return [without_definition(one, name) for one in value]
    if holds == "named":
        kept = {member: one for member, one in value.items() if (key, member) != ("$defs", name)}
        return {member: without_definition(one, name) for member, one in kept.items()}
    return without_definition(value, name)
