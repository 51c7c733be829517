"""Replaces dynamic references by static ones, where their targets depend on the path of the evaluation.

Each schema is copied for each set of dynamic anchors in force on a path to it. Copies keep their inner structure, so
that a pointer into one leads back to the request's schema.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from attrs import define, field, frozen

from enginehouse.contract.schema_keywords import SUBSCHEMAS
from enginehouse_llguidance.schemas.document import REFERENCES, Document
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer

__all__ = ["StaticSchema", "static_schema"]

_Anchors = int
"""Number of a set of dynamic anchors in force; 0 is none."""

_LEFT_OUT = frozenset({"$defs", "definitions", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "contentSchema"})


@frozen
class StaticSchema:
    """A schema without dynamic references.

    Attributes:
        root: its JSON.
        origins: pointers of its definitions to those of the schemas that they are copies of.
    """

    root: Any
    origins: dict[str, str]

    def origin(self, pointer: str) -> str:
        """Return the pointer in the request's schema."""
        steps = pointer.split("/")
        start = "/".join(steps[:3])
        return self.origins[start] + pointer[len(start) :] if start in self.origins else pointer


def static_schema(document: Document, max_subschemas: int) -> StaticSchema:
    """Copy a schema for the paths to its parts.

    Raises:
        SchemaProblem: a reference leads nowhere, or there are too many copies.
    """
    return _Copier(document, max_subschemas).run()


@define
class _Copier:
    document: Document
    max_subschemas: int
    names: dict[tuple[str, _Anchors], str] = field(factory=dict)
    waiting: deque[tuple[str, str, _Anchors]] = field(factory=deque)
    num_copied: int = 0
    own: dict[str, dict[str, str]] = field(factory=dict)  # of each resource, by its URI: names and pointers
    sets: list[dict[str, str]] = field(factory=lambda: [{}])  # by number: schemas may have thousands of anchors
    numbers: dict[frozenset[tuple[str, str]], _Anchors] = field(factory=lambda: {frozenset(): 0})
    entered: dict[tuple[_Anchors, str], _Anchors] = field(factory=dict)  # by those outside a resource, and its URI

    def __attrs_post_init__(self) -> None:
        for name, pointers in self.document.dynamic_anchors.items():
            for pointer in pointers:
                self.own.setdefault(self.document.base_of(pointer), {}).setdefault(name, pointer)

    def run(self) -> StaticSchema:
        root = self._copy(self.document.root, "", 0)
        definitions = {}
        while self.waiting:
            name, pointer, anchors = self.waiting.popleft()
            definitions[name] = self._copy(self.document.at(pointer), pointer, anchors)
        origins = {f"/$defs/{name}": pointer for (pointer, _), name in self.names.items()}
        return StaticSchema({**root, "$defs": definitions}, origins)

    def _copy(self, schema: Any, pointer: str, anchors: _Anchors) -> Any:
        if not isinstance(schema, dict):
            return schema
        self.num_copied += 1
        if self.num_copied > self.max_subschemas:
            message = f"the schema has more than {self.max_subschemas} subschemas, counted for each path to them"
            raise SchemaProblem(pointer, message)
        anchors = self._entered(pointer, anchors)
        return {
            key: self._copy_member(key, value, pointer, anchors)
            for key, value in schema.items()
            if key not in _LEFT_OUT
        }

    def _copy_member(self, key: str, value: Any, pointer: str, anchors: _Anchors) -> Any:
        place = join_pointer(pointer, [key])
        if key in REFERENCES:
            return self._reference(key, value, pointer, anchors)
        if key not in SUBSCHEMAS:
            return value
        if isinstance(value, list):
            return [self._copy(one, join_pointer(place, [index]), anchors) for index, one in enumerate(value)]
        if SUBSCHEMAS[key] == "named" and isinstance(value, dict):
            return {name: self._copy(one, join_pointer(place, [name]), anchors) for name, one in value.items()}
        return self._copy(value, place, anchors)

    def _reference(self, key: str, reference: Any, pointer: str, anchors: _Anchors) -> str:
        place = join_pointer(pointer, [key])
        if not isinstance(reference, str):
            raise SchemaProblem(place, "must be a string")
        target = self.document.find(reference, pointer, place)
        if (name := self.document.dynamic_name(key, reference, target)) is not None:
            target = self.sets[anchors].get(name, target)
        copy = (target, self._entered(target, anchors))
        if copy not in self.names:
            self.names[copy] = f"p{len(self.names)}"
            self.waiting.append((self.names[copy], *copy))
        return f"#/$defs/{self.names[copy]}"

    def _entered(self, pointer: str, anchors: _Anchors) -> _Anchors:
        """Return the anchors in force below a schema: those of the outermost resources count."""
        base = self.document.base_of(pointer)
        if (anchors, base) not in self.entered:
            found = self.own.get(base, {}) | self.sets[anchors]
            number = self.numbers.setdefault(frozenset(found.items()), len(self.sets))
            if number == len(self.sets):
                self.sets.append(found)
            self.entered[anchors, base] = number
        return self.entered[anchors, base]
