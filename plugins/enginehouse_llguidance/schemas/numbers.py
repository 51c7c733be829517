"""Bounds of numbers, rewritten so that the library enforces them exactly.

The library stores bounds as floats, writes them as decimals, and in places lets an exclusive bound through. Here every
bound becomes an inclusive one that every reader parses as the same number: an integer that a float represents exactly,
or a decimal of at most 15 digits. An exclusive bound of a ``number`` moves inwards by a trillionth of its value, so
that no digit sequence can round to it. In edge cases the result allows fewer numbers than the schema, never more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

from enginehouse_llguidance.schemas.markers import CHECKED, FAR, LISTED
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer

__all__ = [
    "ANY_INTEGER",
    "EXACT_DIGITS",
    "MAX_INTEGER",
    "NUMBER_FORMATS",
    "has_far_numbers",
    "is_exact_integer",
    "is_finite",
    "is_multiple",
    "is_number",
    "number_keywords",
]

NUMBER_FORMATS: dict[str, tuple[int, int] | None] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "int": None,
    "uint": (0, 2**64 - 1),
    "float": None,
    "double": None,
}
"""Number formats written by schema generators, with their bounds."""

_MAX_MULTIPLE = 10_000  # the library's automaton has one state per remainder
_MAX_SCATTERED = 1000  # numbers that are not multiples are drawn again; multiples further apart are listed
_MAX_LISTED = 1000
MAX_INTEGER = 2**63 - 1024  # the library uses 64-bit integers
_MAX_DECIMAL = 9 * 10**18
_USUAL_INTEGER = 10**18  # bound if the schema sets none; limits the number of digits
_FAR_BOUNDS = {
    **{"minimum": 1, "exclusiveMinimum": 1, "multipleOf": 1, "divisibleBy": 1},
    **{"maximum": -1, "exclusiveMaximum": -1},
}
"""Keywords, and the sign of a value that asks for far numbers."""

_STEP = Fraction(1, 10**12)
ANY_INTEGER = {"type": "integer", "minimum": -_USUAL_INTEGER, "maximum": _USUAL_INTEGER}
"""Prepared form of an integer without bounds."""
_MAX_DECIMALS = 9
EXACT_DIGITS = 15
"""Decimals with this number of digits are distinct as floats, and the library reads them exactly."""


def is_number(value: Any) -> bool:
    """True if a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Return True for a number that is neither infinite nor not a number."""
    return isinstance(value, int) or math.isfinite(value)


def is_exact_integer(value: float) -> bool:
    """True if the library reads an integral number as the same integer."""
    return abs(value) <= MAX_INTEGER and int(float(value)) == value


def has_far_numbers(root: Any) -> bool:
    """Return True if a schema asks for numbers beyond the bounds of integers without bounds."""
    waiting = [root]
    while waiting:
        one = waiting.pop()
        waiting += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        for key, value in one.items() if isinstance(one, dict) else ():
            if key in ("const", "enum"):
                if _has_far_constant(value):
                    return True
            elif key in _FAR_BOUNDS and is_number(value) and value * _FAR_BOUNDS[key] > _USUAL_INTEGER:
                return True
    return False


def _has_far_constant(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_far_constant, value.values() if isinstance(value, dict) else value))
    return is_number(value) and abs(value) > _USUAL_INTEGER


def number_keywords(
    schema: Mapping[str, Any], pointer: str, *, integer: bool, exact: bool, is_far: bool = False
) -> dict[str, Any]:
    """Return the keywords that enforce the bounds of ``schema``.

    Args:
        integer: only integers are allowed.
        exact: values are listed elsewhere (``enum``); the number of decimals is not restricted.
        is_far: integers without bounds may have more digits than a reader of 64 bits takes.
    """
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if key in schema and not (is_number(schema[key]) and is_finite(schema[key])):
            raise SchemaProblem(join_pointer(pointer, [key]), "must be a finite number")
    low, high = _bounds(schema, integer)
    multiple, is_checked, is_listed = _multiple_of(schema, pointer, integer)
    if low is None and high is None and multiple is None and (is_far or not integer):
        return {}  # any number, including exponents
    limit = Fraction(MAX_INTEGER if integer else _MAX_DECIMAL)
    if (low is not None and low > limit) or (high is not None and high < -limit):
        key = "minimum" if low is not None and low > limit else "maximum"
        return {CHECKED: join_pointer(pointer, [key]), FAR: (low, high)}
    span = Fraction(str(schema["multipleOf"])) * _MAX_LISTED if is_listed else Fraction(0)
    if integer:
        usual = max(Fraction(_USUAL_INTEGER), span)
        least = low if low is not None else min(-usual, (high or 0) - usual)
        high = high if high is not None else max(usual, least + usual)
        low = least
    elif multiple is not None:
        # Multiples are exact up to this bound.
        bound = Fraction((10**EXACT_DIGITS if is_checked else 2**53) // Fraction(str(multiple)).denominator)
        bound = max(bound, span)
        low = max(-bound, -bound if low is None else low)
        high = min(bound, bound if high is None else high)
    if is_listed:
        return {LISTED: _multiples(low, high, schema["multipleOf"], integer)}
    keywords: dict[str, Any] = {}
    write = _written_integer if integer else _written_decimal
    if low is not None:
        keywords["minimum"] = write(low, up=True)
    if high is not None:
        keywords["maximum"] = write(high, up=False)
    if multiple is not None:
        keywords["multipleOf"] = multiple
        if is_checked:
            keywords[CHECKED] = join_pointer(pointer, ["multipleOf"])
    elif not integer and not exact and (decimals := _decimals(keywords)):
        keywords["multipleOf"] = float(f"1e-{decimals}")
    return keywords


def _bounds(schema: Mapping[str, Any], integer: bool) -> tuple[Fraction | None, Fraction | None]:
    """Return the inclusive bounds; exclusive ones are moved to the next number."""
    low = [Fraction(schema["minimum"])] if "minimum" in schema else []
    high = [Fraction(schema["maximum"])] if "maximum" in schema else []
    name = schema.get("format")
    bounds = NUMBER_FORMATS.get(name) if isinstance(name, str) else None
    if bounds is not None:
        low.append(Fraction(bounds[0]))
        high.append(Fraction(bounds[1]))
    if "exclusiveMinimum" in schema:
        low.append(_next(schema["exclusiveMinimum"], 1, integer))
    if "exclusiveMaximum" in schema:
        high.append(_next(schema["exclusiveMaximum"], -1, integer))
    if integer:
        low, high = [Fraction(math.ceil(bound)) for bound in low], [Fraction(math.floor(bound)) for bound in high]
    return max(low, default=None), min(high, default=None)


def _next(bound: float, direction: int, integer: bool) -> Fraction:
    """Return the first number beyond an exclusive bound, in the given direction."""
    exact = Fraction(bound)
    if integer:
        return Fraction(math.floor(exact) + 1 if direction > 0 else math.ceil(exact) - 1)
    scale = Fraction(10) ** Decimal(bound).adjusted() if bound else 1
    return exact + direction * max(scale * _STEP, _STEP)


def _multiple_of(schema: Mapping[str, Any], pointer: str, integer: bool) -> tuple[float | int | None, bool, bool]:
    """Return the ``multipleOf`` of the grammar; True if values are checked besides; True if they are listed instead."""
    value = schema.get("multipleOf")
    if value is None:
        return None, False, False
    if value <= 0:
        raise SchemaProblem(join_pointer(pointer, ["multipleOf"]), "must be above 0")
    is_binary = _is_binary(value)
    exact = Fraction(value) if is_binary else Fraction(str(value))
    if integer:
        exact = Fraction(exact.numerator)
    unit = Fraction(1, exact.denominator)
    if not integer and not is_binary:
        num_decimals = max(0, -int(Decimal(str(value)).as_tuple().exponent))
        unit = Fraction(1, 10 ** min(num_decimals, _MAX_DECIMALS))
        written = exact if exact % unit == 0 and exact / unit <= _MAX_MULTIPLE and _is_read_exactly(value) else unit
    else:
        number = exact.numerator
        written = unit * next(one for one in range(min(number, _MAX_MULTIPLE), 0, -1) if number % one == 0)
    is_listed = exact / written > _MAX_SCATTERED
    return int(written) if written.denominator == 1 else float(written), written != exact or not is_binary, is_listed


def _multiples(lowest: Fraction, highest: Fraction, divisor: float, integer: bool) -> list[float | int]:
    """Return the multiples within bounds that are closest to zero, in their order."""
    exact = Fraction(str(divisor))
    step = Fraction(exact.numerator) if integer else exact
    low, high = math.ceil(lowest / step), math.floor(highest / step)
    first = min(max(low, -_MAX_LISTED // 2), max(low, high - _MAX_LISTED))
    numbers = (step * count for count in range(first, min(high, first + _MAX_LISTED) + 1))
    values = (int(one) if one.denominator == 1 else float(one) for one in numbers)
    return [one for one in values if is_multiple(one, divisor) and (isinstance(one, int) or _is_short(one))]


def _is_short(value: float) -> bool:
    return len(Decimal(repr(value)).as_tuple().digits) <= EXACT_DIGITS


def is_multiple(value: float, divisor: float) -> bool | None:
    """Return True if a quotient is a whole number; None if exact arithmetic and the division of floats disagree."""
    try:
        quotient = value / divisor
    except OverflowError:
        return None
    if not is_finite(value):
        return None
    by_floats = math.isfinite(quotient) and quotient == int(quotient)
    is_exact = Fraction(str(value)) % Fraction(str(divisor)) == 0
    return is_exact if is_exact == by_floats else None


def _is_read_exactly(value: float) -> bool:
    """Return True if the library, which multiplies by 10 until a number is whole, keeps its digits."""
    for _ in range(_MAX_DECIMALS):
        if value == int(value):
            break
        value *= 10
    return value == int(value)


def _is_binary(value: float) -> bool:
    """Return True if floats hold a number exactly: then the division by it is exact, too."""
    exact = Fraction(value)
    return exact.denominator <= 2**10 and exact == Fraction(str(value))


def _written_integer(bound: Fraction, *, up: bool) -> int:
    """Convert a bound for the library: the closest integer inside the range that a float represents exactly."""
    exact = max(-MAX_INTEGER, min(MAX_INTEGER, int(bound)))
    written = int(float(exact))
    if (written < bound) if up else (written > bound):
        written = int(math.nextafter(float(exact), math.inf if up else -math.inf))
    return max(-MAX_INTEGER, min(MAX_INTEGER, written))


def _written_decimal(bound: Fraction, *, up: bool) -> float | int:
    """Convert a bound for the library: 15 digits, and not too small, because each digit adds a nesting level."""
    limited = max(Fraction(-_MAX_DECIMAL), min(Fraction(_MAX_DECIMAL), bound))
    if 0 < abs(limited) < _STEP:
        limited = (_STEP if up else Fraction(0)) if limited > 0 else (Fraction(0) if up else -_STEP)
    context = Context(prec=EXACT_DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    written = context.divide(Decimal(limited.numerator), Decimal(limited.denominator))
    return int(written) if written == written.to_integral_value() else float(written)


def _decimals(keywords: Mapping[str, Any]) -> int:
    """Maximum number of decimals within these bounds; 0 means any. Limits the number of digits."""
    bounds = [abs(Fraction(keywords[key])) for key in ("minimum", "maximum") if key in keywords]
    if len(bounds) < 2 or keywords["minimum"] == keywords["maximum"]:
        return 0
    decimals = min(_MAX_DECIMALS, EXACT_DIGITS - len(str(int(max(bounds)))))
    span = Fraction(keywords["maximum"]) - Fraction(keywords["minimum"])
    return decimals if decimals > 0 and span * 10**decimals > 1000 else 0
