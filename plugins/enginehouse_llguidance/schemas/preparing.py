"""Rewrites the schema of a request into one that the library enforces exactly, or refuses it with a reason.

The library handles most of JSON Schema correctly, some edge cases wrongly, and silently ignores unknown keywords. So it
never receives a request's schema: each keyword is checked here and rewritten in a tested form, or refused with its JSON
pointer. A prepared schema may allow less than the original (no texts that JSON readers parse differently), never more.
This module walks the schema; the modules next to it handle the keywords.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_llguidance.patterns import limited_work
from enginehouse_llguidance.schemas.arrays import array_keywords
from enginehouse_llguidance.schemas.constants import (
    is_exact_number,
    literals_of,
    read_constants,
    requires_unique,
    text_of_number,
)
from enginehouse_llguidance.schemas.derived import derived_schemas, exclusive_conditions, exclusive_options, without
from enginehouse_llguidance.schemas.document import COMPLEX, REFERENCES, Document, inner_schemas
from enginehouse_llguidance.schemas.dynamic import static_schema
from enginehouse_llguidance.schemas.early import MALFORMED, modernized
from enginehouse_llguidance.schemas.finite import find_endless
from enginehouse_llguidance.schemas.joins import Joins
from enginehouse_llguidance.schemas.keywords import TYPES, allows_nothing
from enginehouse_llguidance.schemas.markers import CHECKED, ESCAPED, FAR, LISTED, MATCHED, UNIQUE, UNIQUE_NAMES
from enginehouse_llguidance.schemas.numbers import ANY_INTEGER, has_far_numbers, number_keywords
from enginehouse_llguidance.schemas.objects import is_closed_beside, object_keywords
from enginehouse_llguidance.schemas.places import Loosening, Place, ValuePath
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, TooManySubschemas
from enginehouse_llguidance.schemas.references import find_cycle
from enginehouse_llguidance.schemas.strings import string_keywords
from enginehouse_llguidance.schemas.texts import Texts
from enginehouse_llguidance.schemas.validation import Bounds, Rules, Validator, find_branches

__all__ = ["PreparedSchema", "prepare_schema", "read_schema"]

_Found = TypeVar("_Found")
_BRANCHES = (*REFERENCES, "allOf", "anyOf", "oneOf")
_MAX_JSON_DEPTH = 120  # the library reads 128 levels
_SCARCE = frozenset({"prefixItems", "contains", "anyOf", "oneOf", "not", "if", "unevaluatedItems"})
"""Keywords of arrays that may run out of different items."""


@frozen
class PreparedSchema:
    """Schema to be enforced by the library.

    Attributes:
        schema: the schema with all definitions.
        parts: pointer in the original and prepared form of every subschema, inner ones first.
        rules: what the library does not enforce; None if there is nothing.
        needs_escapes: a constant has control characters, so strings are written with escapes such as ``\\u0000``.
    """

    schema: Any
    parts: tuple[tuple[str, Any], ...]
    rules: Rules | None
    needs_escapes: bool = False


def read_schema(text: str) -> Any:
    """Parse the JSON of a schema; forms of drafts 3 and 4 are rewritten.

    Raises:
        SchemaProblem: it is not valid JSON, or nested too deeply.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    try:
        schema = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise SchemaProblem("", f"the JSON of the schema is nested deeper than {_MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise SchemaProblem("", f"the schema is not valid JSON: {error}") from error
    _check_depth(schema)
    return modernized(schema)


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(_MAX_JSON_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise SchemaProblem("", f"the JSON of the schema is nested deeper than {_MAX_JSON_DEPTH} levels")


def prepare_schema(
    root: Any, options: LlguidanceOptions, loosened: frozenset[Loosening] = frozenset()
) -> PreparedSchema:
    """Check and rewrite a schema.

    Raises:
        SchemaProblem: something cannot be enforced; includes its location.
    """
    document = Document(root)
    if not document.depends_on_paths:
        with limited_work():
            return _Preparer(document, options, loosened).run()
    static = static_schema(document, options.max_subschemas)
    try:
        with limited_work():
            prepared = _Preparer(Document(static.root), options, loosened).run()
    except SchemaProblem as error:
        raise type(error)(static.origin(error.pointer), error.reason) from error
    return evolve(prepared, parts=tuple((static.origin(pointer), part) for pointer, part in prepared.parts))


@define(eq=False)
class _Preparer:
    """One traversal of a schema and its references."""

    document: Document
    options: LlguidanceOptions
    loosened: frozenset[Loosening]
    parts: list[tuple[str, Any]] = field(factory=list)
    names: dict[tuple[str, ValuePath | None], str] = field(factory=dict)
    waiting: deque[tuple[str, Any, Place]] = field(factory=deque)
    edges: dict[str, list[str]] = field(factory=lambda: defaultdict(list))
    same_value: dict[str, list[str]] = field(factory=lambda: defaultdict(list))
    joins: Joins = field(init=False)
    conditional: dict[str, list[str]] = field(factory=lambda: defaultdict(list))
    checked: dict[str, str] = field(factory=dict)  # pointers of schemas, and what is checked
    left_out: dict[str, str] = field(factory=dict)  # schemas that the grammar does not say, and why
    unique: set[str] = field(factory=set)
    counted: set[str] = field(factory=set)  # objects whose names are counted
    scarce: set[str] = field(factory=set)
    near: dict[str, str] = field(factory=dict)  # schemas whose constants the grammar says nearly, and their keyword
    literals: dict[str, frozenset[bytes]] = field(factory=dict)  # as those of Rules
    bounds: dict[str, Bounds] = field(factory=dict)
    is_far: bool = field(init=False)
    escaped: str | None = None  # pointer of a constant or pattern with control characters
    uses_any_integer: bool = False

    def __attrs_post_init__(self) -> None:
        self.joins = Joins(1) if "texts" in self.loosened else Joins()
        self.is_far = has_far_numbers(self.document.root)

    def run(self) -> PreparedSchema:
        """Traverse the schema, then check the references as a whole."""
        schema = self.prepare(self.document.root, Place())
        definitions = {}
        while self.waiting:
            name, value, place = self.waiting.popleft()
            definitions[name] = self.prepare(value, place)
        if self.uses_any_integer:
            definitions["integer"] = ANY_INTEGER
        self._check_references()
        endless = find_endless(self.parts, definitions)
        if endless is not None:
            raise SchemaProblem(endless, "every value that satisfies the schema would have to contain another one")
        parts = tuple((pointer, _with_definitions(part, definitions)) for pointer, part in self.parts)
        if self.escaped is not None:
            self._count_ambiguous_names(self.escaped)
        whole = _with_definitions(schema, definitions)
        return PreparedSchema(whole, parts, self._rules(), self.escaped is not None)

    def _count_ambiguous_names(self, pointer: str) -> None:
        """Check all of a value if a name may be written in two ways: the library takes one for another name."""
        for place, part in self.parts:
            if isinstance(part, dict) and any(min(name, default=" ") < " " for name in part.get("properties", ())):
                self.checked[""] = pointer
                self.counted.add(place)

    def _rules(self) -> Rules | None:
        """Return what is enforced while the answer is written, by the schemas that always apply to a value.

        What is asked for in a branch is checked where the branch is chosen.
        """
        asked = {*self.checked, *self.unique, *self.counted}
        if not asked:
            return None
        checked = dict(self.checked)
        for place, what in self._above(asked):
            checked.setdefault(place, what)
        for place, origin in self._above(set(self.near), only_branches=False):
            checked.setdefault(place, self.near[origin])  # where another schema excludes them no value may begin
        # What is derived is not part of the document, but the schema that it is derived from is above.
        checked = {place: what for place, what in checked.items() if self.document.has(place)}
        texts, branches = Texts(), set[str]()
        for place in checked:
            branches |= find_branches(self.document, place, texts, in_branch=False)
        for place in filter(self.document.has, self.left_out):
            branches |= find_branches(self.document, place, texts, in_branch=True)
        validator = Validator(self.document, texts, frozenset(branches))
        return Rules(
            validator,
            validator.always([""]),
            frozenset(checked),
            unique=frozenset(self.unique),
            names=frozenset(self.counted),
            scarce=frozenset(self.scarce | self.counted),
            literals=self.literals | self._of_schemas({*checked, *branches}, literals_of),
            bounds=self.bounds,
            searches=self._of_schemas(branches, texts.search_of),
        )

    def _of_schemas(self, places: set[str], read: Callable[[dict[str, Any]], _Found | None]) -> dict[str, _Found]:
        """Return what is found in schemas, by their pointers."""
        schemas = ((place, self.document.at(place)) for place in places)
        found = ((place, read(one)) for place, one in schemas if isinstance(one, dict))
        return {place: one for place, one in found if one is not None}

    def _above(self, asked: set[str], *, only_branches: bool = True) -> Iterator[tuple[str, str]]:
        """Yield the schemas one of whose branches, or parts, leads to one of these, and to which."""
        before: dict[str, list[str]] = defaultdict(list)
        for place, inner in self.edges.items():
            for one in inner:
                before[one].append(place)
        waiting = [(one, one) for one in asked]
        seen: set[str] = set()
        while waiting:
            one, origin = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            for place in before[one]:
                if not only_branches or one in self.conditional[place]:
                    yield place, origin
                waiting.append((place, origin))

    def _check_references(self) -> None:
        looping = find_cycle(self.same_value, list(self.same_value))
        if looping is not None:
            raise SchemaProblem(looping, "the schema refers to itself without end")

    def prepare(self, value: Any, place: Place) -> Any:
        """Return the prepared form of one subschema."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise SchemaProblem(place.pointer, "a schema must be an object, true or false")
        if place.depth > self.options.max_depth:
            raise SchemaProblem(place.pointer, f"the schema is nested deeper than {self.options.max_depth} levels")
        if len(self.parts) >= self.options.max_subschemas:
            message = f"the schema has more than {self.options.max_subschemas} subschemas"
            raise TooManySubschemas(place.pointer, message)
        for name in MALFORMED.keys() & value.keys():
            raise SchemaProblem(place.at(name), MALFORMED[name])
        prepared: Any = self._rewrite(value, place)
        if prepared.get("enum") == []:
            prepared = False  # which the library tells from a schema without a value
        elif prepared == ANY_INTEGER:  # shared, because its automaton is large
            self.uses_any_integer, prepared = True, {"$ref": "#/$defs/integer"}
        self.parts.append((place.pointer, prepared))
        return prepared

    def _rewrite(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        if self.document.is_early and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}  # until draft 7 a reference replaces its schema
        types = _types(schema, place)
        branches = [key for key in _BRANCHES if key in schema]
        derived = self._derived(schema, place)
        grouped: list[int] = []
        if "allOf" in schema and "derived" not in self.loosened:
            grouped, one = exclusive_conditions(self.document, schema, place.pointer)
            derived += [("allOf", one)] if grouped else []
        is_alone = not branches and not derived and place.pointer not in self.checked
        own = place if is_alone else place.beside()
        prepared: dict[str, Any] = {}
        if "type" in schema:
            prepared["type"] = types[0] if len(types) == 1 else types
        prepared |= self._of_types(schema, types, own)
        self._add_constants(schema, types, prepared, place)
        self._take_marks(prepared, types, place)
        if not _SCARCE.isdisjoint(schema) or ("array" in types and schema.get("minItems", 0) > 1):
            self.scarce.add(place.pointer)
        if branches:
            is_only = len(branches) == 1 and not prepared and not derived
            self._add_branches(schema, branches, prepared, place if is_only else place.beside(), grouped)
        if derived and not branches and is_closed_beside(self.document, schema, [one for _, one in derived], place):
            prepared["additionalProperties"] = False
        for key, one in derived:
            branch = place.beside().of_branch(key, "*")  # unlike the pointers of the schemas that it refers to
            self._note_branch(place, branch, is_conditional=True)
            prepared["allOf"] = [*prepared.get("allOf", []), self.prepare(one, branch)]
        return prepared

    def _take_marks(self, prepared: dict[str, Any], types: list[str], place: Place) -> None:
        """Take out of a prepared form what it says about the rules."""
        if prepared.pop(UNIQUE, False) and requires_unique(prepared):
            self.unique.add(place.pointer)
        if prepared.pop(UNIQUE_NAMES, False):
            self.counted.add(place.pointer)
        if (listed := prepared.pop(LISTED, None)) is not None:
            self._add_listed(listed, types, prepared, place)
        if (bounds := prepared.pop(FAR, None)) is not None:
            self.bounds[place.pointer] = bounds
        if what := prepared.pop(CHECKED, None):
            self.checked[place.pointer] = what
        if what := prepared.pop(MATCHED, None):
            self.checked[place.pointer] = self.left_out[place.pointer] = what

    def _derived(self, schema: dict[str, Any], place: Place) -> list[tuple[str, Any]]:
        """Return keyword and schema for what others express, without those that allow everything."""
        found = []
        for key, derive in derived_schemas(self.document, schema, place.pointer):
            try:
                one = derive()
                is_said = "derived" not in self.loosened or key in ("minProperties", "maxProperties")
            except NotExpressible:
                is_said = False
            if not is_said:
                self._check_later(schema, place, key)
                one = without(self.document, schema, place.pointer, key)
            if one is not True:
                found.append((key, one))
            if is_said and (one is True or key.startswith("unevaluated")):  # its own schema may be without effect
                self._find_faults(schema, place, key)
        return found

    def _check_later(self, schema: dict[str, Any], place: Place, key: str) -> None:
        """Leave a keyword to the check of complete values."""
        self.checked[place.pointer] = place.at(key)
        for pointer in self._find_faults(schema, place, key):
            self.left_out[pointer] = place.at(key)
            if key in ("not", "if", "dependentSchemas", "dependencies"):
                self._note_branch(place, Place(pointer), is_conditional=True)

    def _find_faults(self, schema: dict[str, Any], place: Place, key: str) -> list[str]:
        """Prepare the schemas of a keyword that are not in the grammar; return their pointers."""
        inner = inner_schemas({key: schema[key]}, place.pointer)
        found = {
            pointer: value for pointer, value in inner if key != "dependencies" or not isinstance(value, list | str)
        }
        num_parts = len(self.parts)
        for pointer, value in found.items():
            self.prepare(value, Place(pointer, place.depth + 1))
        del self.parts[num_parts:]
        return list(found)

    def _note_branch(self, place: Place, branch: Place, *, is_conditional: bool) -> None:
        if is_conditional:
            self.conditional[place.pointer].append(branch.pointer)
        self.edges[place.pointer].append(branch.pointer)
        self.same_value[place.pointer].append(branch.pointer)

    def _of_types(self, schema: dict[str, Any], types: list[str], own: Place) -> dict[str, Any]:
        """Return the keywords that apply to values of each type."""

        def prepare(value: Any, *steps: str | int) -> Any:
            part = own.of_part(*steps)
            self.edges[own.pointer].append(part.pointer)
            return self.prepare(value, part)

        keywords: dict[str, Any] = {}
        if "number" in types or "integer" in types:
            exact = "enum" in schema or "const" in schema or not own.is_alone
            keywords |= number_keywords(
                schema, own.pointer, integer="number" not in types, exact=exact, is_far=self.is_far
            )
            multiple = keywords.get("multipleOf")
            if multiple is not None and own.joined is not None and not self.joins.adds_multiple(own.joined, multiple):
                del keywords["multipleOf"]
                keywords[CHECKED] = own.at("multipleOf")
        if "string" in types:
            keywords |= self._of_strings(schema, own)
            self.escaped = self.escaped or keywords.pop(ESCAPED, None)
        if "array" in types:
            keywords |= array_keywords(schema, own, prepare)
        if "object" in types:
            keywords |= object_keywords(self._with_names(schema, own), own, prepare, self.loosened)
        return keywords

    def _of_strings(self, schema: dict[str, Any], own: Place) -> dict[str, Any]:
        found = string_keywords(schema, own.pointer, is_loose="texts" in self.loosened)
        patterns = {one["pattern"] for one in (found, *found.get("allOf", ())) if "pattern" in one}
        if patterns and own.joined is not None and not self.joins.adds_patterns(own.joined, patterns):
            found = {key: value for key, value in found.items() if key not in ("pattern", "allOf")}
            found[MATCHED] = own.at("pattern" if "pattern" in schema else "format")
        return found

    def _with_names(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        """Return a schema with the names themselves, where ``propertyNames`` is a reference to them."""
        names = schema.get("propertyNames")
        if not isinstance(names, dict) or names.keys() != {"$ref"}:
            return schema
        value = self.document.target(names, place.at("propertyNames"))[1]
        is_same = not isinstance(value, dict) or COMPLEX.isdisjoint(value)  # at any place
        return {**schema, "propertyNames": value} if is_same else schema

    def _add_constants(self, schema: dict[str, Any], types: list[str], prepared: dict[str, Any], place: Place) -> None:
        constants = read_constants(schema, types, place, self.options.max_choices)
        prepared |= constants.keywords
        if constants.near:
            for key in ("minimum", "maximum", "multipleOf", FAR, LISTED):  # which are checked with the constants
                prepared.pop(key, None)
            prepared["allOf"] = [*prepared.get("allOf", []), {"anyOf": list(constants.near)}]
            self.near[place.pointer] = self.checked[place.pointer] = place.at("const" if "const" in schema else "enum")
        self.escaped = self.escaped or constants.escaped

    def _add_listed(self, listed: list[Any], types: list[str], prepared: dict[str, Any], place: Place) -> None:
        """Add the only numbers that are allowed."""
        numbers: Any = {"enum": listed} if listed else False
        if not all(map(is_exact_number, listed)):
            numbers = {"type": "number"}
            self.checked[place.pointer] = place.at("multipleOf")
            self.literals[place.pointer] = frozenset(text_of_number(one).encode() for one in listed)
        others = [name for name in types if name not in ("integer", "number")]
        added = {"anyOf": [{"type": others}, numbers]} if others else numbers
        prepared["allOf"] = [*prepared.get("allOf", []), added]

    def _add_branches(
        self, schema: dict[str, Any], branches: list[str], prepared: dict[str, Any], place: Place, grouped: list[int]
    ) -> None:
        """Add the schemas that apply to the same value, without the members of ``allOf`` that are grouped."""
        if branches[0] in REFERENCES:
            target, value = self.document.target(schema, place.pointer)
            if allows_nothing(value):  # as a definition, it would be refused also where no value is needed
                prepared["allOf"] = [False]
            elif reference := self._reference(target, value, place):
                prepared["$ref"] = reference
        for key in ("allOf", "anyOf", "oneOf"):
            if key not in branches:
                continue
            options: list[Any] = schema[key]
            suffix: tuple[str, ...] = ()
            if not isinstance(options, list) or not options:
                raise SchemaProblem(place.at(key), "must be a list with at least one schema")
            if key == "oneOf":
                options, suffix = self._exclusive(schema, place)
            around = place.beside() if key == "allOf" and len(options) > 1 else place
            found = []
            for index, option in enumerate(options):
                if key == "allOf" and index in grouped:
                    continue
                branch = around.of_branch(key, index, *suffix)
                self._note_branch(place, branch, is_conditional=key != "allOf")
                found.append(self.prepare(option, branch))
            if key == "allOf":
                prepared["allOf"] = [*prepared.get("allOf", []), *found]
            elif "anyOf" in prepared:
                prepared["allOf"] = [*prepared.get("allOf", []), {"anyOf": found}]
            else:
                prepared["anyOf"] = found  # equivalent to oneOf if the options are disjoint

    def _exclusive(self, schema: dict[str, Any], place: Place) -> tuple[list[Any], tuple[str, ...]]:
        """Return the options of ``oneOf`` of which any may hold, and what their pointers end with."""
        try:
            exclusive = exclusive_options(self.document, schema, place.pointer)
            if exclusive is None:
                return schema["oneOf"], ()
            if "derived" not in self.loosened:
                return exclusive, ("*",)
        except NotExpressible:
            pass
        self.checked[place.pointer] = place.at("oneOf")
        return schema["oneOf"], ()

    def _reference(self, target: str, value: Any, place: Place) -> str:
        """Return the reference; "" where a recursive schema beside others is checked from its second level on."""
        self.edges[place.pointer].append(target)
        self.same_value[place.pointer].append(target)
        if target in place.entered:
            self.checked[place.pointer] = self.left_out[target] = place.at("$ref")
            return ""
        key = (target, place.joined)
        if key not in self.names:
            self.names[key] = f"d{len(self.names)}"
            entered = place.entered if place.is_alone else place.entered | {target}
            self.waiting.append((self.names[key], value, Place(target, 0, place.joined, entered)))
        return f"#/$defs/{self.names[key]}"


def _with_definitions(schema: Any, definitions: dict[str, Any]) -> Any:
    return {**schema, "$defs": definitions} if definitions and isinstance(schema, dict) else schema


def _types(schema: Mapping[str, Any], place: Place) -> list[str]:
    """Return the allowed types; an integer counts as a number."""
    named = schema.get("type", list(TYPES))
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise SchemaProblem(place.at("type"), "must be a string or a list of strings")
    for name in names:
        if name not in TYPES:
            shown = repr(name)[:60]
            raise SchemaProblem(place.at("type"), f"{shown} is not a type; the types are {', '.join(TYPES)}")
    return [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]
