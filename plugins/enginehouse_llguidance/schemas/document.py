"""A schema as a document: its resources (``$id``), anchors and references. Nothing is ever fetched.

Synthetic schemas, which this package derives from a request's, refer to parts of the document by ``Pointer``: they then
mean the same wherever they are placed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote, urldefrag, urljoin

from enginehouse.contract.schema_keywords import SUBSCHEMAS
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, join_pointer

__all__ = ["COMPLEX", "RECURSIVE", "REFERENCES", "Document", "Pointer", "inner_schemas"]

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
RECURSIVE = "#"
"""Name of ``$recursiveAnchor`` among the dynamic anchors: no other name has this character."""
COMPLEX = frozenset({*SUBSCHEMAS, *REFERENCES, "$id"}) - {"$defs", "definitions"}
"""Keywords whose meaning depends on the place of the schema."""


_Derived = TypeVar("_Derived")


class Pointer(str):
    """A JSON pointer into the document, as the value of a synthetic ``$ref``."""

    __slots__ = ()


class Document:
    """The whole schema of a request.

    Args:
        root: its JSON.

    Attributes:
        is_early: draft 7 or earlier, where keywords beside ``$ref`` have no effect.
        dynamic_anchors: pointers of the schemas with a ``$dynamicAnchor``, by its name.
        known: what was derived from its schemas, by subject and pointer: schemas may be referred to many times. A
            SchemaProblem if it cannot be derived, or is being derived.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.known: dict[tuple[str, str], Any] = {}
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self.is_early = isinstance(dialect, str) and re.search(r"/draft-0[3-7]/", dialect) is not None
        self._resources: dict[str, str] = {"": ""}  # URI to pointer
        self._anchors: dict[tuple[str, str], str] = {}
        self.dynamic_anchors: dict[str, list[str]] = {}
        self._bases: dict[str, str] = {"": ""}  # pointer of a resource to its URI
        self._has_dynamic = False
        waiting: list[tuple[Any, str, str]] = [(root, "", "")]
        while waiting:
            schema, pointer, base = waiting.pop()
            if isinstance(schema, dict):
                base = self._note(schema, pointer, base)
                waiting.extend((value, inner, base) for inner, value in inner_schemas(schema, pointer))

    def _note(self, schema: dict[str, Any], pointer: str, base: str) -> str:
        name = schema.get("$id") if not (self.is_early and "$ref" in schema) else None
        if isinstance(name, str) and name.startswith("#"):  # of draft 7: an anchor
            self._anchors.setdefault((base, name[1:]), pointer)
        elif isinstance(name, str):
            base = urldefrag(_joined(base, name))[0]
            self._resources.setdefault(base, pointer)
            self._bases[pointer] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), pointer)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self.dynamic_anchors.setdefault(schema["$dynamicAnchor"], []).append(pointer)
        self._has_dynamic = self._has_dynamic or "$dynamicRef" in schema or "$recursiveRef" in schema
        if schema.get("$recursiveAnchor") is True and pointer in self._bases:  # has an effect at a resource's root only
            self.dynamic_anchors.setdefault(RECURSIVE, []).append(pointer)
        return base

    @property
    def depends_on_paths(self) -> bool:
        """True if a ``$dynamicRef`` or ``$recursiveRef`` may refer to several schemas, depending on the path to it."""
        return self._has_dynamic and any(
            len(pointers) > 1 and len(self._of_root(pointers)) != 1 for pointers in self.dynamic_anchors.values()
        )

    @property
    def has_resources(self) -> bool:
        """True if references depend on their place."""
        return any(pointer for pointer in self._bases)

    def target(self, schema: dict[str, Any], pointer: str) -> tuple[str, Any]:
        """Return pointer and value of what the reference of a schema refers to.

        Args:
            pointer: of the schema.

        Raises:
            SchemaProblem: it is not part of this document, or depends on the path of the evaluation.
        """
        key = next(name for name in REFERENCES if name in schema)
        reference, place = schema[key], join_pointer(pointer, [key])
        if isinstance(reference, Pointer):
            return reference, self.at(reference, place)
        if not isinstance(reference, str):
            raise SchemaProblem(place, "must be a string")
        found = self.find(reference, pointer, place)
        name = self.dynamic_name(key, reference, found)
        if name is not None:
            found = self._outermost(self.dynamic_anchors[name], place)
        return found, self.at(found, place)

    def dynamic_name(self, key: str, reference: str, found: str) -> str | None:
        """Return the name of the dynamic anchors of which a reference means the outermost; None if there is none.

        Args:
            key: its keyword.
            found: the pointer that the reference has where it is written.
        """
        if key == "$recursiveRef" and found in self.dynamic_anchors.get(RECURSIVE, ()):
            return RECURSIVE
        name = unquote(urldefrag(reference)[1])
        value = self.at(found) if key == "$dynamicRef" else None
        return name if isinstance(value, dict) and value.get("$dynamicAnchor") == name else None

    def once(self, subject: str, pointer: str, derive: Callable[[], _Derived]) -> _Derived:
        """Return ``derive()``, which is called once for a subject and a pointer.

        Raises:
            SchemaProblem: of ``derive``.
            NotExpressible: it depends on its own result.
        """
        key = (subject, pointer)
        if key not in self.known:
            self.known[key] = NotExpressible(pointer, f"{subject} refers to itself without end")
            try:
                self.known[key] = derive()
            except SchemaProblem as error:
                self.known[key] = error
        found = self.known[key]
        if isinstance(found, SchemaProblem):
            raise found
        return found  # type: ignore[no-any-return]

    def has(self, pointer: str) -> bool:
        """Return True if there is a value at a pointer."""
        try:
            self.at(pointer)
        except SchemaProblem:
            return False
        return True

    def at(self, pointer: str, place: str = "") -> Any:
        """Return the value at a pointer. Raises SchemaProblem."""
        value = self.root
        for step in _steps(pointer):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isascii() and step.isdecimal() and int(step[:9]) < len(value):
                value = value[int(step)]
            else:
                raise SchemaProblem(place, f"{pointer[:100]!r} does not exist in this schema")
        return value

    def find(self, reference: str, pointer: str, place: str) -> str:
        """Return the pointer that a reference has where it is written. Raises SchemaProblem."""
        base = self.base_of(pointer)
        uri, fragment = urldefrag(_joined(base, reference))
        fragment = unquote(fragment)
        start = self._resources.get(uri, self._resources.get(base) if reference.startswith("#") else None)
        if start is None:
            raise SchemaProblem(place, f"{reference[:100]!r} is not part of this schema; nothing is fetched")
        if not fragment or fragment.startswith("/"):
            found = join_pointer(start, _steps(fragment))
            try:
                self.at(found, place)
            except SchemaProblem:
                raise SchemaProblem(place, f"{reference[:100]!r} does not exist in this schema") from None
            return found
        anchor = self._anchors.get((uri, fragment))
        if anchor is None:
            raise SchemaProblem(
                place, f"{reference[:100]!r} does not exist: this schema has no anchor {fragment[:60]!r}"
            )
        return anchor

    def base_of(self, pointer: str) -> str:
        """Return the base URI at a pointer: that of the innermost resource around it."""
        if len(self._bases) == 1:
            return self._bases[""]
        while pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases[pointer]

    def _outermost(self, pointers: list[str], place: str) -> str:
        """Return the one of the dynamic anchors that every evaluation, which begins at the root, finds first."""
        if len(pointers) == 1:
            return pointers[0]
        own = self._of_root(pointers)
        if len(own) != 1:
            raise SchemaProblem(place, "may refer to several schemas, depending on the path to it; use $ref")
        return own[0]

    def _of_root(self, pointers: list[str]) -> list[str]:
        root = self._bases[""]
        return [pointer for pointer in pointers if self.base_of(pointer) == root]


def inner_schemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of each direct subschema."""
    for name, value in schema.items():
        holds = SUBSCHEMAS.get(name)
        if holds == "named" and isinstance(value, dict):
            yield from ((join_pointer(pointer, [name, key]), one) for key, one in value.items())
        elif holds == "schemas" and isinstance(value, list):
            yield from ((join_pointer(pointer, [name, index]), one) for index, one in enumerate(value))
        elif holds is not None:
            yield join_pointer(pointer, [name]), value


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#") or not reference:
        return f"{base}{reference}"
    return urljoin(base, reference)
