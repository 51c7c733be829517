"""Evaluates the request's own schemas on complete values: for what the grammar does not say.

Called while an answer is written, for the places that :mod:`enginehouse_llguidance.schemas.preparing` names. Patterns
and formats that always apply are in the grammar. In branches they are evaluated, and a value is wrong if it takes a
string on which validators disagree to find out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from attrs import define, field, frozen

from enginehouse_llguidance.patterns import AutomatonError, Backtracker
from enginehouse_llguidance.schemas.document import REFERENCES, Document, inner_schemas
from enginehouse_llguidance.schemas.numbers import is_multiple
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.texts import Texts, TooLarge, Undecided
from enginehouse_llguidance.schemas.values import is_of_type, key_of

__all__ = ["NO_RULES", "Bounds", "Rules", "TooLarge", "Validator", "find_branches"]

_CONDITIONAL = frozenset(
    {"anyOf", "oneOf", "not", "if", "then", "else", "contains", "dependentSchemas", "dependencies"}
)
_EVALUATING = frozenset({*_CONDITIONAL, *REFERENCES, "allOf"})
_NUMBERS = (int, float)
_MAX_EVALUATED = 50_000  # a tenth of a second


def find_branches(document: Document, pointer: str, texts: Texts, *, in_branch: bool) -> set[str]:
    """Return the pointers of the schemas below one that need not apply, so that the grammar does not enforce them.

    Args:
        in_branch: the schema itself is in a branch, or left out of the grammar.

    Raises:
        SchemaProblem: the pattern of one cannot be evaluated.
    """
    seen: set[tuple[str, bool]] = set()
    waiting = [(pointer, in_branch)]
    while waiting:
        one, in_branch = waiting.pop()
        schema = document.at(one)
        if (one, in_branch) in seen or not isinstance(schema, dict):
            continue
        seen.add((one, in_branch))
        if in_branch:
            _read_patterns(schema, one, texts)
        for name in REFERENCES:
            if name in schema:
                waiting.append((document.target({name: schema[name]}, one)[0], in_branch))
        for inner, _ in inner_schemas(schema, one):
            key = inner[len(one) + 1 :].split("/", 1)[0]
            waiting.append((inner, in_branch or key in _CONDITIONAL or key == "propertyNames"))
    return {one for one, in_branch in seen if in_branch}


def _read_patterns(schema: dict[str, Any], pointer: str, texts: Texts) -> None:
    steps = [("pattern",)] if "pattern" in schema else []
    for place in (*steps, *(("patternProperties", name) for name in schema.get("patternProperties", ()))):
        try:
            texts.read(schema["pattern"] if place == ("pattern",) else place[-1], join_pointer(pointer, place))
        except AutomatonError as error:
            raise SchemaProblem(join_pointer(pointer, place), f"is too large to be checked: {error}") from error


@define(eq=False)
class Validator:
    """Evaluates the schemas of one document, referred to by pointer.

    Attributes:
        branches: schemas that the grammar does not enforce.
        known: results for the value that is being evaluated, by pointer and identity of a part of it.
    """

    document: Document
    texts: Texts = field(factory=Texts)
    branches: frozenset[str] = frozenset()
    known: dict[tuple[str, int], set[Any] | None] = field(factory=dict)
    steps: dict[tuple[frozenset[str], str | int], frozenset[str]] = field(factory=dict)

    def is_valid(self, pointer: str, value: Any) -> bool:
        """Return True if a value satisfies a schema by all validators.

        Raises:
            TooLarge: too many schemas apply to its parts.
            RecursionError: it is nested too deeply.
        """
        self.known.clear()
        self.texts.num_states = 0
        try:
            return self._is_valid(pointer, value)
        except Undecided:
            return False

    @property
    def num_evaluated(self) -> int:
        """Pairs of a schema and a part of a value, and states of searches, that the last evaluation took."""
        return len(self.known) + self.texts.num_states

    def allows_name(self, pointer: str, name: str) -> bool:
        """Return True if a name may be one of the object to which a schema applies."""
        schema = self.document.at(pointer)
        if not isinstance(schema, dict):
            return True
        schema = self._read(schema)
        if "propertyNames" in schema and not self.is_valid(f"{pointer}/propertyNames", name):
            return False
        try:
            places = self._of_name(schema, pointer, name, is_evaluated=True)
        except Undecided:
            return False
        return all(self.document.at(one) is not False for one in places)

    def most_members(self, pointer: str) -> float:
        """Return the largest number of members of an object to which a schema applies."""
        schema = self.document.at(pointer)
        high: float = self._read(schema).get("maxProperties", math.inf) if isinstance(schema, dict) else math.inf
        return high

    def has_room(self, pointers: frozenset[str], names: frozenset[str], name: str) -> bool:
        """Return False if a further name of an object leaves too little room for those that are required, or too few
        for ``minProperties`` after it.

        Args:
            pointers: schemas that always apply to the object.
        """
        schemas = [self._read(schema) for one in pointers if isinstance(schema := self.document.at(one), dict)]
        missing = {other for schema in schemas for other in schema.get("required", ())} - names - {name}
        size = len(names) + 1
        for schema in schemas:
            if size + len(missing) > schema.get("maxProperties", math.inf):
                return False
            is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
            if is_closed and size < schema.get("minProperties", 0):
                properties = list(schema.get("properties", ()))
                num_later = len(properties) - properties.index(name) - 1 if name in properties else 0
                if size + num_later < schema["minProperties"]:
                    return False
        return True

    # -- places ------------------------------------------------------------------------------------

    def always(self, pointers: Iterable[str]) -> frozenset[str]:
        """Return the schemas that always apply to a value to which some schemas apply."""
        waiting, found = list(pointers), set[str]()
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                schema = self.document.at(one)
                waiting += self._beside(self._read(schema), one) if isinstance(schema, dict) else ()
        return frozenset(found)

    def alternatives(self, pointer: str) -> Iterator[list[str]]:
        """Yield the schemas of each ``anyOf`` and ``oneOf`` of a schema."""
        schema = self.document.at(pointer) if self.document.has(pointer) else True
        for key in ("anyOf", "oneOf") if isinstance(schema, dict) else ():
            if key in self._read(schema):
                yield [join_pointer(pointer, [key, index]) for index in range(len(schema[key]))]

    def step(self, pointers: frozenset[str], step: str | int) -> frozenset[str]:
        """Return the schemas that always apply to a member of a value: its name, or its index."""
        found = self.steps.get((pointers, step))
        if found is None:
            members: list[str] = []
            for one in pointers:
                schema = self.document.at(one)
                if isinstance(schema, dict):
                    schema = self._read(schema)
                    of_member = self._of_name if isinstance(step, str) else self._of_index
                    members += of_member(schema, one, step)  # type: ignore[arg-type]
            found = self.steps[pointers, step] = self.always(members)
        return found

    def _read(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"$ref": schema["$ref"]} if self.document.is_early and "$ref" in schema else schema

    def _beside(self, schema: dict[str, Any], pointer: str) -> Iterator[str]:
        for name in REFERENCES:
            if name in schema:
                yield self.document.target({name: schema[name]}, pointer)[0]
        yield from (join_pointer(pointer, ["allOf", index]) for index in range(len(schema.get("allOf", ()))))

    def _of_name(self, schema: dict[str, Any], pointer: str, name: str, *, is_evaluated: bool = False) -> list[str]:
        found = [join_pointer(pointer, ["properties", name])] if name in schema.get("properties", ()) else []
        is_unknown = False
        for pattern in schema.get("patternProperties", ()):
            try:
                matches = self.texts.matches(pattern, name)
            except (SchemaProblem, AutomatonError):
                matches = None
            if matches is None:
                if is_evaluated and pointer in self.branches:
                    raise Undecided
                matches = is_unknown = True  # both what it asks for and what it excludes
            if matches:
                found.append(join_pointer(pointer, ["patternProperties", pattern]))
        if not found or is_unknown:
            found += [join_pointer(pointer, [key]) for key in _rest_of(schema, "additionalProperties")]
        return found

    def _of_index(self, schema: dict[str, Any], pointer: str, index: int) -> list[str]:
        is_old = isinstance(schema.get("items"), list)
        first, rest = ("items", "additionalItems") if is_old else ("prefixItems", "items")
        if index < len(schema.get(first, ())):
            return [join_pointer(pointer, [first, index])]
        return [join_pointer(pointer, [key]) for key in _rest_of(schema, rest)]

    # -- values ------------------------------------------------------------------------------------

    def _is_valid(self, pointer: str, value: Any) -> bool:
        return self._evaluated(pointer, value) is not None

    def _evaluated(self, pointer: str, value: Any) -> set[Any] | None:
        """Return the names or indices that a schema evaluates in a value; None if the value does not satisfy it."""
        key = (pointer, id(value))
        if key not in self.known:
            if len(self.known) >= _MAX_EVALUATED:
                raise TooLarge(
                    f"a value is too large to be checked ({_MAX_EVALUATED} pairs of a schema and a part of it); "
                    "limit its size, for example with maxItems"
                )
            self.known[key] = self._evaluate(pointer, value)
        return self.known[key]

    def _evaluate(self, pointer: str, value: Any) -> set[Any] | None:
        schema = self.document.at(pointer)
        if not isinstance(schema, dict):
            return None if schema is False else set()
        schema = self._read(schema)
        if not _holds(schema, value):
            return None
        parts = [self._of_branches(schema, pointer, value)]
        if isinstance(value, str) and pointer in self.branches and not self._has_text(schema, value):
            return None
        if isinstance(value, dict):
            parts.append(self._of_object(schema, pointer, value))
        elif isinstance(value, list):
            parts.append(self._of_array(schema, pointer, value))
        seen = _union(parts)  # a set of its own, which may grow
        if seen is None:
            return None
        members = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
        rest = "unevaluatedItems" if isinstance(value, list) else "unevaluatedProperties"
        if rest in schema and members:
            if not all(self._is_valid(f"{pointer}/{rest}", one) for key, one in members.items() if key not in seen):
                return None
            seen.update(members)
        return seen

    def _has_text(self, schema: dict[str, Any], text: str) -> bool:
        found = [self.texts.matches(schema["pattern"], text)] if "pattern" in schema else []
        found += [self.texts.has_format(schema["format"], text)] if "format" in schema else []
        if None in found and False not in found:
            raise Undecided
        return all(found)

    def _of_branches(self, schema: dict[str, Any], pointer: str, value: Any) -> set[Any] | None:
        found = [self._evaluated(one, value) for one in self._beside(schema, pointer)]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                places = (join_pointer(pointer, [key, index]) for index in range(len(schema[key])))
                right = [one for one in (self._evaluated(place, value) for place in places) if one is not None]
                if not right or (key == "oneOf" and len(right) > 1):
                    return None
                found += right
        if "not" in schema and self._is_valid(f"{pointer}/not", value):
            return None
        if "if" in schema:
            condition = self._evaluated(f"{pointer}/if", value)
            found += [condition] if condition is not None else []
            key = "else" if condition is None else "then"
            found += [self._evaluated(f"{pointer}/{key}", value)] if key in schema else []
        if isinstance(value, dict):
            for key in ("dependentSchemas", "dependencies"):
                for name, needed in schema.get(key, {}).items():
                    if name in value and isinstance(needed, dict | bool):
                        found.append(self._evaluated(join_pointer(pointer, [key, name]), value))
        return _union(found)

    def _of_object(self, schema: dict[str, Any], pointer: str, value: dict[str, Any]) -> set[Any] | None:
        for key in ("dependentRequired", "dependencies"):
            for name, needed in schema.get(key, {}).items():
                names = [needed] if isinstance(needed, str) else needed
                if name in value and isinstance(names, list) and not all(one in value for one in names):
                    return None
        seen: set[Any] = set()
        for name, one in value.items():
            if "propertyNames" in schema and not self._is_valid(f"{pointer}/propertyNames", name):
                return None
            places = self._of_name(schema, pointer, name, is_evaluated=True)
            if not all(self._is_valid(place, one) for place in places):
                return None
            seen |= {name} if places else set()
        return seen

    def _of_array(self, schema: dict[str, Any], pointer: str, value: list[Any]) -> set[Any] | None:
        seen: set[Any] = set()
        for index, one in enumerate(value):
            places = self._of_index(schema, pointer, index)
            if not all(self._is_valid(place, one) for place in places):
                return None
            seen |= {index} if places else set()
        if "contains" in schema:
            contained = {index for index, one in enumerate(value) if self._is_valid(f"{pointer}/contains", one)}
            if not schema.get("minContains", 1) <= len(contained) <= schema.get("maxContains", math.inf):
                return None
            seen |= contained
        return seen


def _rest_of(schema: dict[str, Any], key: str) -> list[str]:
    """Return the keyword of the other members, which ``unevaluated...`` is where nothing beside evaluates members."""
    if key in schema:
        return [key]
    unevaluated = "unevaluatedProperties" if key == "additionalProperties" else "unevaluatedItems"
    return [unevaluated] if unevaluated in schema and _EVALUATING.isdisjoint(schema) else []


def _union(parts: Iterable[set[Any] | None]) -> set[Any] | None:
    found: set[Any] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _holds(schema: dict[str, Any], value: Any) -> bool:  # noqa: PLR0911 - one per type
    """Return True if a value satisfies the keywords that contain no schemas."""
    if "type" in schema:
        named = schema["type"]
        if not any(is_of_type(name, value) for name in ([named] if isinstance(named, str) else named)):
            return False
    if "enum" in schema and key_of(value) not in map(key_of, schema["enum"]):
        return False
    if "const" in schema and key_of(value) != key_of(schema["const"]):
        return False
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return _number_holds(schema, value)
    if isinstance(value, str):
        return _is_within(schema, "Length", value)
    if isinstance(value, list):
        is_unique = schema.get("uniqueItems") is not True or len(set(map(key_of, value))) == len(value)
        return is_unique and _is_within(schema, "Items", value)
    if isinstance(value, dict):
        return _is_within(schema, "Properties", value) and all(name in value for name in schema.get("required", ()))
    return True


def _number_holds(schema: dict[str, Any], value: float) -> bool:
    return (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or _is_multiple(value, schema["multipleOf"]))
    )


def _is_multiple(value: float, divisor: float) -> bool:
    found = is_multiple(value, divisor)
    if found is None:
        raise Undecided
    return found


def _is_within(schema: dict[str, Any], of: str, value: Any) -> bool:
    return bool(schema.get(f"min{of}", 0) <= len(value) <= schema.get(f"max{of}", math.inf))


Bounds = tuple[Fraction | None, Fraction | None]
"""The smallest and the largest whole number that is allowed."""


@frozen(eq=False)
class Rules:
    """Rules that are enforced beside the grammar, by pointer of the request's schema.

    Attributes:
        root: schemas that always apply to the whole value.
        checked: schemas that a value is evaluated with when it is complete.
        unique: arrays without equal items.
        names: objects without equal names.
        scarce: those of the arrays and objects that may run out of different items or names.
        literals: texts of all values of a schema that have one of their types, if the grammar does not say them.
        bounds: of numbers, beyond what the grammar says.
        searches: expressions for all of a string, of which the grammar allows more.
    """

    validator: Validator
    root: frozenset[str]
    checked: frozenset[str] = frozenset()
    unique: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    scarce: frozenset[str] = frozenset()
    literals: Mapping[str, frozenset[bytes]] = field(factory=dict)
    bounds: Mapping[str, Bounds] = field(factory=dict)
    searches: Mapping[str, Backtracker] = field(factory=dict)

    @property
    def is_guided(self) -> bool:
        """True if something is known about partial values."""
        return bool(self.literals or self.bounds or self.searches)


NO_RULES = Rules(Validator(Document(True)), frozenset())
"""Of values whose grammar says all."""
