"""Values that a model writes as texts: their types are those of the schema."""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.contract.types import Tool
from enginehouse_parsers.json_schemas import types_of
from enginehouse_parsers.loose_value import LooseValue
from enginehouse_parsers.value_writer import END_OF_MEMBER, Member, as_json, read_json

__all__ = ["TypedMembers", "typed"]

_TYPES_BY_FIRST = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': "string"}


def typed(text: str, types: set[str]) -> str:
    """Return the JSON of a value that was written without quotation marks; ``types`` are those that its schema allows.

    It is a text if it can be nothing else that the schema allows.
    """
    stripped = text.strip()
    value = LooseValue()
    if stripped and not value.finish(stripped).strip():
        written = "".join(piece for piece in value.out if isinstance(piece, str))
        number = "number" if set(written) & set(".eE") else "integer"
        found = _TYPES_BY_FIRST.get(written[:1], number)
        if found != "string" and found in types:
            return written
        if found == "string" and stripped[:1] in "\"'" and "string" not in types:
            return written
    return as_json(text)


class TypedMembers:
    """The members of one call's arguments, as :class:`LooseValue` hands them out one by one.

    A text for an argument that cannot be a text is read as what it says. Others are handed out while they arrive.
    """

    def __init__(self, tool: Tool) -> None:
        properties = tool.parameters.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._root = tool.parameters
        self._num_members = 0
        self._types: set[str] = set()
        self._held: list[str] | None = None  # of a value that cannot be a text

    def written(self, pieces: Iterable[object]) -> str:
        """Return the JSON of the next pieces."""
        return "".join(self._written(piece) for piece in pieces)

    def end(self) -> str:
        """Return the end of the object."""
        return "}" if self._num_members else "{}"

    def _written(self, piece: object) -> str:
        if isinstance(piece, Member):
            self._types = types_of(self._properties.get(piece.name), self._root)
            self._held = None if "string" in self._types else []
            self._num_members += 1
            return f"{', ' if self._num_members > 1 else '{'}{as_json(piece.name)}: "
        if piece is END_OF_MEMBER:
            text, self._held = "".join(self._held or ()), None
            return typed(read_json(text), self._types) if text.startswith('"') else text
        assert isinstance(piece, str)
        if self._held is None:
            return piece
        self._held.append(piece)
        return ""
