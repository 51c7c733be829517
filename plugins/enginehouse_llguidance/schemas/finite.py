"""Checks that a prepared schema has a finite value: a list whose every item must contain such a list has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

__all__ = ["find_endless"]

_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})


def find_endless(parts: Sequence[tuple[str, Any]], definitions: Mapping[str, Any]) -> str | None:
    """Return the pointer of a part without any finite value, because each would contain another one, or None.

    Args:
        parts: pointer and prepared schema of every part.
        definitions: definitions referenced by the parts, by name.
    """
    search = _Search(definitions)
    while search.grows():
        pass
    return next((pointer for pointer, part in parts if not search.ends(part)), None)


@define
class _Search:
    """Fixed-point search for the definitions that have a finite value."""

    definitions: Mapping[str, Any]
    ending: set[str] = field(factory=set)

    def grows(self) -> bool:
        """Run one round; True if it found more."""
        found = {name for name, schema in self.definitions.items() if name not in self.ending and self.ends(schema)}
        self.ending |= found
        return bool(found)

    def ends(self, schema: Any) -> bool:
        """True if a finite value exists by the current knowledge; undecidable cases count as True."""
        if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
            return True
        if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in self.ending:
            return False
        if not all(map(self.ends, schema.get("allOf", ()))):
            return False
        if "anyOf" in schema and not any(map(self.ends, schema["anyOf"])):
            return False
        named = schema.get("type", "null")
        types = {named} if isinstance(named, str) else set(named)
        return bool(
            types & _SCALARS
            or ("array" in types and self._array_ends(schema))
            or ("object" in types and self._object_ends(schema))
        )

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        num_items = schema.get("minItems", 0)
        prefix = schema.get("prefixItems", [])
        rest = [schema.get("items", True)] if num_items > len(prefix) else []
        return all(map(self.ends, [*prefix[:num_items], *rest]))

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties", {})
        needed = [properties.get(name, schema.get("additionalProperties", True)) for name in schema.get("required", ())]
        return all(map(self.ends, needed))
