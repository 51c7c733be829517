"""Constants: ``const`` and ``enum``, in the form that the library writes back as the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from attrs import frozen

from enginehouse_llguidance.schemas.numbers import EXACT_DIGITS, is_exact_integer, is_finite, is_number
from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import has_control_characters, is_text
from enginehouse_llguidance.schemas.values import is_of_type, key_of

__all__ = ["Constants", "is_exact_number", "literals_of", "read_constants", "requires_unique", "text_of_number"]

_MAX_DECIMALS = 22  # up to here a decimal is read as the closest float by every division


@frozen
class Constants:
    """The values that a schema lists.

    Attributes:
        keywords: for those that the library writes exactly.
        near: schemas that allow others as well as more, for values that the library does not write.
        escaped: pointer of a value with control characters.
    """

    keywords: dict[str, Any]
    near: tuple[Any, ...] = ()
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
    exact, near, escaped = [], list[Any](), None
    problem: NotExpressible | None = None
    for pointer, value in given.items():
        if not any(is_of_type(name, value) for name in types):
            continue
        try:
            _check(value, pointer)
        except NotExpressible as error:
            problem = problem or error
            continue
        if _is_exact(value):
            exact.append(_written(value))
        else:
            near.append(_near(value))
        if _is_escaped(value):
            escaped = escaped or pointer
    if problem is not None and not exact and not near:
        raise problem
    keywords: dict[str, Any] = {"const": exact[0]} if "const" in schema and exact else {"enum": exact}
    if not near:
        return Constants(keywords, escaped=escaped)
    return Constants({}, (*([keywords] if exact else []), *near), escaped)


def literals_of(schema: dict[str, Any]) -> frozenset[bytes] | None:
    """Return the texts of the values that a schema lists; None if the library writes all that it lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    found = [value for value in values if _is_written(value)]
    return None if all(map(_is_exact, found)) else frozenset(_text_of(value).encode() for value in found)


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


def _inner(value: Any, pointer: str) -> Iterator[tuple[Any, str]]:
    """Yield a value and all values in it with their pointers."""
    yield value, pointer
    members = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, member in members:
        yield from _inner(member, join_pointer(pointer, [key]))


def _check(value: Any, pointer: str) -> None:
    """Raise NotExpressible if no text of UTF-8 has a value, SchemaProblem if it is not JSON."""
    for one, place in _inner(value, pointer):
        if not all(map(is_text, _texts_of(one))):
            raise NotExpressible(place, "a lone surrogate is not a character")
        if is_number(one) and not is_finite(one):
            raise SchemaProblem(place, "must be finite")


def _texts_of(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value if isinstance(value, dict) else ()


def _is_written(value: Any) -> bool:
    """Return True if a text of UTF-8 has a value."""
    return all(map(is_text, (text for one, _ in _inner(value, "") for text in _texts_of(one))))


def _is_exact(value: Any) -> bool:
    """Return True if the library writes a constant back as the same value."""
    return all(is_exact_number(one) for one, _ in _inner(value, "") if is_number(one))


def is_exact_number(value: float) -> bool:
    """Return True if the library writes a number back as the same one."""
    if value == int(value):
        return is_exact_integer(value)
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= EXACT_DIGITS and int(exponent) >= -_MAX_DECIMALS


def _written(value: Any) -> Any:
    """Return a constant as it is given to the library: whole numbers without a point."""
    if isinstance(value, list):
        return list(map(_written, value))
    if isinstance(value, dict):
        return {name: _written(member) for name, member in value.items()}
    return int(value) if is_number(value) and value == int(value) else value


def _near(value: Any) -> Any:
    """Return a schema for a constant that allows other numbers for those that the library does not write."""
    if _is_exact(value):
        return {"const": _written(value)}
    if isinstance(value, list):
        return {
            "type": "array",
            "prefixItems": list(map(_near, value)),
            "items": False,
            "minItems": len(value),
            "maxItems": len(value),
        }
    if isinstance(value, dict):
        members = {name: _near(member) for name, member in value.items()}
        return {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    return {"type": "integer" if value == int(value) else "number"}


def _text_of(value: Any) -> str:
    """Return a value as the library writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text_of, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text_of(name)}: {_text_of(member)}' for name, member in value.items())}}}"
    if is_number(value):
        return text_of_number(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def text_of_number(value: float) -> str:
    """Return the text of a number: digits, except for fractions with many zeros."""
    if value == int(value):
        return str(int(value))
    exact = Decimal(repr(value))
    return repr(value) if int(exact.as_tuple().exponent) < -_MAX_DECIMALS else format(exact, "f")
