"""Constants: ``const`` and ``enum``, in the form that the library writes back as the same values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from attrs import frozen

from enginehouse_llguidance.schemas.numbers import EXACT_DIGITS, MAX_INTEGER, around, is_exact_integer, is_number
from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import has_control_characters, is_text
from enginehouse_llguidance.schemas.values import is_of_type, key_of

__all__ = ["Constants", "read_constants", "requires_unique"]

_MAX_DECIMALS = 22  # up to here a decimal is read as the closest float by every division


@frozen
class Constants:
    """The values that a schema lists.

    Attributes:
        keywords: for those that the library writes exactly.
        near: schemas of numbers around others, which are checked.
        numbers: texts of all numbers, if there are such others.
        escaped: pointer of a value with control characters.
    """

    keywords: dict[str, Any]
    near: tuple[dict[str, Any], ...] = ()
    numbers: frozenset[bytes] = frozenset()
    escaped: str | None = None


def read_constants(schema: Mapping[str, Any], types: Sequence[str], place: Place, max_choices: int) -> Constants:
    """Return the values of ``const`` or ``enum`` that have one of the types. One that cannot be written is left out if
    there are others.

    Raises:
        SchemaProblem: the keyword is malformed, or none of its values can be written.
    """
    values = schema.get("enum", [])
    if not isinstance(values, list):
        raise SchemaProblem(place.at("enum"), "must be a list")
    if len(values) > max_choices:
        raise SchemaProblem(place.at("enum"), f"has more than {max_choices} values")
    given = {place.at("enum", index): value for index, value in enumerate(values)}
    if "const" in schema:
        is_listed = "enum" not in schema or key_of(schema["const"]) in map(key_of, values)
        given = {place.at("const"): schema["const"]} if is_listed else {}
    elif "enum" not in schema:
        return Constants({})
    exact, near, problem, escaped = [], list[dict[str, Any]](), None, None
    for pointer, value in given.items():
        if not any(is_of_type(name, value) for name in types):
            continue
        try:
            exact.append(_written(value, pointer))
        except NotExpressible as error:
            problem = problem or error
            near += [around(value)] if _is_near(value) else []
            continue
        if _is_escaped(value):
            escaped = escaped or pointer
    if problem is not None and not exact and not near:
        raise problem
    keywords: dict[str, Any] = {"const": exact[0]} if "const" in schema and exact else {"enum": exact}
    if not near:
        return Constants(keywords, escaped=escaped)
    numbers = frozenset(_text_of(value) for value in given.values() if is_number(value))
    return Constants({}, (*([keywords] if exact else []), *near), numbers, escaped)


def requires_unique(prepared: dict[str, Any]) -> bool:
    """Enforce ``uniqueItems`` on constants; True if it is to be enforced while an array is written."""
    if "const" in prepared and not _has_unique_items(prepared["const"]):
        prepared["enum"] = []
    elif "enum" in prepared:
        prepared["enum"] = [value for value in prepared["enum"] if _has_unique_items(value)]
    return "const" not in prepared and "enum" not in prepared


def _has_unique_items(value: Any) -> bool:
    return not isinstance(value, list) or len(set(map(key_of, value))) == len(value)


def _is_escaped(value: Any) -> bool:
    if isinstance(value, str):
        return has_control_characters(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_escaped, inner))


def _is_near(value: Any) -> bool:
    """Return True for a number between two that the library writes."""
    if not is_number(value) or abs(value) > MAX_INTEGER:
        return False
    return isinstance(value, int) or int(Decimal(repr(value)).as_tuple().exponent) >= -_MAX_DECIMALS


def _text_of(number: float) -> bytes:
    is_whole = number == int(number)
    return (str(int(number)) if is_whole else format(Decimal(repr(number)), "f")).encode()


def _written(value: Any, pointer: str) -> Any:
    """Return a constant that the library writes back as the same value.

    Raises:
        NotExpressible: there is none.
        SchemaProblem: it is not JSON.
    """
    if isinstance(value, str):
        if not is_text(value):
            raise NotExpressible(pointer, "a lone surrogate is not a character")
    elif isinstance(value, list):
        return [_written(item, join_pointer(pointer, [index])) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        if not all(map(is_text, value)):
            raise NotExpressible(pointer, "a lone surrogate is not a character")
        return {name: _written(item, join_pointer(pointer, [name])) for name, item in value.items()}
    elif is_number(value):
        if not math.isfinite(value):
            raise SchemaProblem(pointer, "must be finite")
        if value == int(value):
            if not is_exact_integer(value):
                raise NotExpressible(pointer, "an integer of more than 63 bits cannot be written exactly")
            return int(value)
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        if len(digits) > EXACT_DIGITS or int(exponent) < -_MAX_DECIMALS:
            raise NotExpressible(pointer, f"more than {_MAX_DECIMALS} digits after the point are not supported")
    return value
