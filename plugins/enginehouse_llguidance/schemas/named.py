"""Names of properties by expressions: ``patternProperties`` and ``propertyNames``.

The library takes patterns that exclude each other. Those that may match one name become one pattern for each
combination; where that is too large, one for all, and values are checked when they are complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations
from typing import Any

from enginehouse_llguidance.patterns import (
    ANY_TEXT,
    NO_TEXT,
    AutomatonError,
    Expression,
    NothingMatches,
    Pattern,
    escape_text,
    listed,
    restricted,
)
from enginehouse_llguidance.schemas.keywords import is_enforced
from enginehouse_llguidance.schemas.markers import CHECKED, ESCAPED, MATCHED
from enginehouse_llguidance.schemas.places import Place, Prepare
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import is_text, read_pattern, string_keywords
from enginehouse_llguidance.schemas.texts import Texts, in_ascii

__all__ = ["add_pattern_properties", "restrict_names"]

_PLAIN = "[\\x{20}-\\x{7e}]*"
_MAX_LISTED = 64
"""Maximum number of names that a pattern matches and that become properties."""

_MAX_OVERLAPPING = 4
"""Maximum number of patterns of names that are combined where they overlap."""
_MAX_COMPARED = 30
"""Maximum number of patterns of names that are compared with each other; the library compares more."""


def add_pattern_properties(
    schema: dict[str, Any],
    required: list[str],
    keywords: dict[str, Any],
    place: Place,
    prepare: Prepare,
    *,
    is_loose: bool,
) -> None:
    """Add the keywords for ``patternProperties`` to those of ``properties`` and ``additionalProperties``.

    Args:
        is_loose: if there are many patterns, or another schema restricts the same object, all free names have the
            values that some may have, and are checked.
    """
    patterns = schema["patternProperties"]
    read = {one: read_pattern(one, place.at("patternProperties", one)) for one in patterns}
    values = {one: prepare(value, "patternProperties", one) for one, value in patterns.items()}
    if "" in values and "additionalProperties" in schema:
        _add_to_all(values.pop(""), values, keywords)
    if keywords.get("properties") or required or not place.is_alone:
        _list_names(read, values, keywords)
    if not values:
        return
    if is_loose and (not place.is_alone or len(values) > _MAX_COMPARED):
        rest = keywords.get("additionalProperties", True)
        keywords["additionalProperties"] = {"anyOf": [*values.values(), *([] if rest is False else [rest])]}
        keywords[MATCHED] = place.at("patternProperties")
        return
    bodies = {one: body for one in values if (body := _body(read[one])) is not None}
    values = {one: values[one] for one in bodies}
    prepared: dict[str, Any] = {}
    for one, value in values.items():
        _add(prepared, f"^(?:{bodies[one][0]})$", value)
    names = _named(keywords, required)
    is_exact = all(is_exact for _, is_exact in bodies.values()) and all(
        place.is_alone and _has_others(bodies[one][0], names)  # the library offers a further name even if all are taken
        for one in values
        if read[one].is_finite
    )
    if any(read[one].depends_on_dialect for one in values):
        try:
            prepared = _where_dialects_agree(prepared, names, values, keywords)
        except AutomatonError:
            is_exact = False
    if any(body == ANY_TEXT for body, _ in bodies.values()):
        keywords["additionalProperties"] = False  # there are no other names, which the library does not see
    found, is_divided = _disjoint(prepared) if len(prepared) <= _MAX_COMPARED else (prepared, True)
    keywords["patternProperties"] = found
    if not (is_exact and is_divided):
        keywords[MATCHED] = place.at("patternProperties")


def _add_to_all(value: Any, values: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Add the schema of an empty pattern to those of all members: validators differ on whether it matches."""
    for found in (values, keywords.get("properties", {})):
        for name, other in found.items():
            found[name] = {"allOf": [other, value]}
    if keywords["additionalProperties"] is not False:
        keywords["additionalProperties"] = {"allOf": [keywords["additionalProperties"], value]}


def _list_names(read: dict[str, Pattern], values: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Make properties of the names that a pattern matches, if they are few: the library offers a further name even if
    all of a pattern are taken. In Python, the end also matches before a final line break.
    """
    exact = {one: body[0] for one in values if read[one].is_finite and (body := _body(read[one])) and body[1]}
    names = {one: listed(body, _MAX_LISTED) for one, body in exact.items()}
    is_open = keywords.get("additionalProperties") is not False or len(values) > len(names) or None in names.values()
    for pattern, found in names.items():
        if found is None:
            continue
        value = values.pop(pattern)
        properties = keywords.setdefault("properties", {})
        for name in found:
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value
            if is_open or f"{name}\n" in properties:
                properties[f"{name}\n"] = False


def _named(keywords: dict[str, Any], required: list[str]) -> list[str]:
    properties = keywords.get("properties", {})
    return [name for name in dict.fromkeys((*properties, *required)) if properties.get(name) is not False]


def _body(pattern: Pattern) -> tuple[str, bool] | None:
    """Return one expression for a pattern, and False if that matches more; None if no name matches."""
    if not pattern.conditions and pattern.regex != NO_TEXT:
        return pattern.regex, pattern.is_exact
    try:
        return restricted(pattern.regex, [(one, False) for one in pattern.conditions]), pattern.is_exact
    except NothingMatches:
        return None
    except AutomatonError:
        return pattern.regex, False


def _add(found: dict[str, Any], pattern: str, value: Any) -> None:
    """Add what a pattern asks for, which may be the same as an earlier one in another form."""
    found[pattern] = {"allOf": [found[pattern], value]} if pattern in found else value


def _has_others(body: str, names: list[str]) -> bool:
    """Return True if an expression matches others than some names, or if there are none."""
    try:
        return not names or bool(restricted(body, [(escape_text(name), True) for name in names]))
    except AutomatonError:
        return False


def _where_dialects_agree(
    prepared: dict[str, Any], names: list[str], values: dict[str, Any], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Return patterns that are restricted to printable ASCII, and add the other names that are known.

    Raises:
        AutomatonError: an expression is too large.
    """
    others = [name for name in names if not (name.isascii() and name.isprintable())]
    if not others and len(values) < 2 and keywords.get("additionalProperties") is False:
        return prepared
    given = {name: _of_name(name, values, keywords) for name in others}
    properties = {**keywords.get("properties", {}), **given}
    rest = keywords.get("additionalProperties", True)
    bodies = {pattern: in_ascii(pattern.removeprefix("^").removesuffix("$")) for pattern in prepared}
    asked = [(_PLAIN, [(bodies[one], False)], value) for one, value in prepared.items()]
    if rest is not False:
        asked.append((_PLAIN, [(other, True) for other in (*bodies.values(), *map(escape_text, properties))], rest))
    found: dict[str, Any] = {}
    for body, conditions, value in asked:
        with suppress(NothingMatches):  # such names have other characters
            _add(found, f"^{restricted(body, conditions)}$", value)
    if given:
        keywords["properties"] = properties
    keywords["additionalProperties"] = False
    return found


def _of_name(name: str, values: dict[str, Any], keywords: dict[str, Any]) -> Any:
    """Return the schema of a property beside patterns that are restricted to ASCII; False if dialects disagree."""
    texts = Texts()
    found = [texts.matches(pattern, name) for pattern in values]
    if None in found:
        return False
    asked = [value for value, is_found in zip(values.values(), found, strict=True) if is_found]
    if name in keywords.get("properties", ()):
        return {"allOf": [keywords["properties"][name], *asked]}
    return {"allOf": asked} if asked else keywords.get("additionalProperties", True)


def _disjoint(prepared: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return patterns of which a name matches at most one; False if values have to be checked besides."""
    bodies = {pattern: pattern.removeprefix("^").removesuffix("$") for pattern in prepared}
    found: dict[str, Any] = {}
    is_exact = True
    for group in _overlapping(bodies):
        combined = _combined(group, bodies, prepared) if len(group) <= _MAX_OVERLAPPING else None
        if combined is None:
            is_exact = False
            values = [prepared[one] for one in group]
            combined = {f"^(?:{'|'.join(bodies[one] for one in group)})$": {"anyOf": values}}
        found |= combined
    return found, is_exact


def _overlapping(bodies: dict[str, str]) -> list[list[str]]:
    """Return the patterns in groups, none of which matches a name of another."""
    groups: list[list[str]] = []
    for pattern, body in bodies.items():
        near = [group for group in groups if any(_may_overlap(body, bodies[other]) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(one for group in near for one in group), pattern])
    return groups


def _may_overlap(one: str, other: str) -> bool:
    try:
        return bool(restricted(one, [(other, False)]))
    except NothingMatches:
        return False
    except AutomatonError:
        return True


def _combined(group: list[str], bodies: dict[str, str], prepared: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pattern for each combination of some that a name may match; None if they are too large."""
    if len(group) == 1:
        return {group[0]: prepared[group[0]]}
    found: dict[str, Any] = {}
    for chosen in (chosen for size in range(1, len(group) + 1) for chosen in combinations(group, size)):
        first, *others = chosen
        conditions = [(bodies[one], False) for one in others]
        conditions += [(bodies[one], True) for one in group if one not in chosen]
        values = [prepared[one] for one in chosen if prepared[one] is not True and prepared[one] != {}]
        try:
            body = restricted(bodies[first], conditions)
        except NothingMatches:
            continue
        except AutomatonError:
            return None
        found[f"^(?:{body})$"] = values[0] if len(values) == 1 else {"allOf": values} if values else True
    return found


def _both(body: str, conditions: Iterable[tuple[str, bool]]) -> str | None:
    """Return an expression for what matches all; None if nothing does. Raises AutomatonError if it is too large."""
    try:
        return restricted(body, list(conditions))
    except NothingMatches:
        return None


def restrict_names(
    schema: dict[str, Any],
    required: list[str],
    keywords: dict[str, Any],
    place: Place,
    prepare: Prepare,
    *,
    is_loose: bool,
) -> None:
    """Rewrite ``propertyNames`` as the only pattern that names may match, or as a list; others are checked.

    Args:
        is_loose: all but lists are checked, if another schema restricts the same object.
    """
    pointer, names = place.at("propertyNames"), schema["propertyNames"]
    if names is False:
        _allow_no_names(keywords)
        return
    if not isinstance(names, dict):
        raise SchemaProblem(pointer, "a schema must be an object, true or false")
    if "string" not in ([names["type"]] if isinstance(names.get("type"), str) else names.get("type", ["string"])):
        _allow_no_names(keywords)  # names are strings
        return
    asked = _asked(names)
    if not asked:
        return
    if asked <= {"enum", "const"} and "patternProperties" not in keywords:
        _only_names(_allowed(names, pointer), schema, keywords, place)
        keywords["additionalProperties"] = False
        return
    try:
        body = _body_of_names(names, asked, pointer) if place.is_alone or not is_loose else None
        if body is not None:
            _only_matching(body, required, keywords)
            if not _allows_more(names):
                return
    except NothingMatches:
        _allow_no_names(keywords)
        return
    except AutomatonError:
        pass
    prepare(names, "propertyNames")
    keywords[CHECKED] = pointer


def _allows_more(names: dict[str, Any]) -> bool:
    """Return True if the expression for names matches others as well."""
    options = names.get("anyOf", ())
    return MATCHED in string_keywords(names, "") or any(isinstance(one, dict) and _allows_more(one) for one in options)


def _allow_no_names(keywords: dict[str, Any]) -> None:
    keywords |= {"properties": {}, "patternProperties": {}, "additionalProperties": False}


def _allowed(names: dict[str, Any], pointer: str) -> dict[str, None]:
    allowed = names["enum"] if "enum" in names else [names["const"]]
    if not isinstance(allowed, list):
        raise SchemaProblem(join_pointer(pointer, ["enum"]), "must be a list with at least one value")
    texts = (name for name in allowed if isinstance(name, str) and is_text(name))
    return dict.fromkeys(name for name in texts if names.get("const", name) == name)


def _body_of_names(names: Any, asked: set[str], pointer: str) -> str | None:
    """Return an expression for at least the names of a schema; None if it has other keywords.

    Raises:
        NothingMatches: no name satisfies it.
        AutomatonError: the expressions are too large to be combined.
    """
    if not asked or not asked <= {"anyOf", "enum", "const", "pattern", "format", "minLength", "maxLength"}:
        return None
    parts = []
    if not asked.isdisjoint({"enum", "const"}):
        allowed = _allowed(names, pointer)
        if not allowed:
            raise NothingMatches("no name is listed")
        parts.append(f"(?:{'|'.join(map(escape_text, allowed))})")
    if "anyOf" in asked:
        options = names["anyOf"] if isinstance(names["anyOf"], list) else []
        bodies: list[str | None] = []
        for one in options:
            with suppress(NothingMatches):
                bodies.append(_body_of_names(one, _asked(one), pointer))
        if not bodies or None in bodies:
            return None
        parts.append(f"(?:{'|'.join(map(str, bodies))})")
    found = string_keywords(names, pointer)
    if ESCAPED in found:
        return None
    for part in (found, *found.get("allOf", ())):
        if "pattern" in part:
            parts.append(part["pattern"].removeprefix("^").removesuffix("$"))
    if found.get("minLength", 0) > found.get("maxLength", math.inf):
        raise NothingMatches("no name has such a length")
    if {"minLength", "maxLength"} & found.keys() or not parts:
        parts.append(f"(?s:.){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}")
    return restricted(parts[0], [(part, False) for part in parts[1:]]) if len(parts) > 1 else parts[0]


def _asked(names: Any) -> set[str]:
    """Return the keywords with an effect on names."""
    if not isinstance(names, dict):
        return set()
    return {key for key in names if key != "type" and is_enforced(key)}


def _only_matching(body: str, required: list[str], keywords: dict[str, Any]) -> None:
    """Restrict names to those that an expression matches. Raises AutomatonError."""
    patterns, rest = keywords.get("patternProperties", {}), keywords.get("additionalProperties", True)
    properties = keywords.get("properties", {})
    bodies = {pattern: pattern.removeprefix("^").removesuffix("$") for pattern in patterns}
    names = dict.fromkeys((*properties, *required))
    if names:
        allowed, readers = Expression(body), {one: Expression(other) for one, other in bodies.items()}
        given = {}
        for name in names:
            values = [patterns[one] for one, reader in readers.items() if reader.matches(name)]
            values = [properties[name], *values] if name in properties else values or [rest]
            given[name] = allowed.matches(name) and (values[0] if len(values) == 1 else {"allOf": values})
        keywords["properties"] = given
    taken = [(escape_text(name), True) for name in names]
    found: dict[str, Any] = {}
    for pattern, other in bodies.items():
        if (both := _both(other, [(body, False), *taken])) is not None:
            _add(found, f"^(?:{both})$", patterns[pattern])
    if rest is not False:
        conditions = [*((other, True) for other in bodies.values()), *taken]
        if (free := _both(body, conditions) if conditions else body) is not None:
            found[f"^(?:{free})$"] = rest
    keywords["patternProperties"] = found
    keywords["additionalProperties"] = False


def _only_names(listed: dict[str, None], schema: dict[str, Any], keywords: dict[str, Any], place: Place) -> None:
    properties, value = keywords.get("properties", {}), keywords.get("additionalProperties", True)
    is_given = not {"additionalProperties", "unevaluatedProperties"}.isdisjoint(schema)
    if place.is_alone and properties and not is_given:
        value = True  # the names are listed here, not in properties
    keywords["properties"] = {name: properties.get(name, value) for name in listed} | {
        name: False for name in properties if name not in listed
    }
