"""Partial values: when they cannot become right any more, and what may follow them.

For constants that the grammar does not say, bounds beyond its numbers, and expressions that take a search. All else is
left to the check of complete values. Called by :mod:`enginehouse_llguidance.following`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import islice, takewhile

from enginehouse_llguidance.schemas.validation import Bounds, Rules

__all__ = ["next_texts", "wrong_end"]

_DIGITS = [bytes([code]) for code in b"0123456789"]
_NUMBER = b"-0123456789"
_BROKEN_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)\Z")

_TYPES = {b"0": {"integer", "number"}, b'"': {"string"}, b"[": {"array"}, b"{": {"object"}}


def wrong_end(text: bytearray, begin: int, since: int, places: frozenset[str], rules: Rules) -> int | None:
    """Return the index after the first byte with which a value in progress is wrong; None if it may become right.

    Args:
        begin: index of the value in the text.
        since: index up to which the text was right.
        places: schemas that always apply to the value.
    """
    if _following(bytes(text[begin:]), places, rules) != []:
        return None
    ends = range(max(begin, since) + 1, len(text))
    return next((end for end in ends if _following(bytes(text[begin:end]), places, rules) == []), len(text))


def next_texts(text: bytearray, begin: int, places: frozenset[str], rules: Rules) -> list[bytes] | None:
    """Return texts, one of which the rest of the text begins, or begins with; None if that is not known. An empty one
    is the end of a number.
    """
    return _following(bytes(text[begin:]), places, rules)


def _following(written: bytes, places: Iterable[str], rules: Rules) -> list[bytes] | None:
    """Return what may follow the beginning of a value; nothing if it is wrong, None: anything."""
    found: list[bytes] | None = None
    for place in places:
        for one in _of_place(written, place, rules):
            if one == []:
                return []
            found = one if found is None else found
    return found


def _of_place(written: bytes, place: str, rules: Rules) -> Iterator[list[bytes] | None]:
    kind = _kind(written)
    if place in rules.literals and (literals := _of_kind(rules.literals[place], kind)):
        yield _of_literals(written, literals)  # where there are none, the grammar says all
    if place in rules.bounds and kind == b"0":
        yield _of_number(written, rules.bounds[place])
    if place in rules.searches and kind == b'"':
        yield _of_string(written, rules.searches[place].following)
    for branches in rules.validator.alternatives(place):
        options = [
            [] if _is_excluded(one, kind, rules) else _following(written, rules.validator.always([one]), rules)
            for one in branches
        ]
        if None not in options:
            yield [one for option in options for one in option or ()]


def _is_excluded(place: str, kind: bytes, rules: Rules) -> bool:
    """Return True if a branch is for values of other types, or lists others."""
    schema = rules.validator.document.at(place)
    if not isinstance(schema, dict):
        return schema is False
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    is_other = bool(types) and types.isdisjoint(_TYPES.get(kind, types))
    return is_other or (place in rules.literals and not _of_kind(rules.literals[place], kind))


def _kind(text: bytes | bytearray) -> bytes:
    return b"0" if text[:1] in _NUMBER else bytes(text[:1])


@lru_cache(maxsize=256)
def _of_kind(literals: frozenset[bytes], kind: bytes) -> tuple[bytes, ...]:
    """Return the literals of a kind, in order; asked for at each token, of up to a thousand literals."""
    return tuple(sorted(one for one in literals if _kind(one) == kind))


def _of_literals(written: bytes, literals: tuple[bytes, ...]) -> list[bytes]:
    later = islice(literals, bisect_left(literals, written), None)
    return [one[len(written) :] for one in takewhile(lambda one: one.startswith(written), later)]


def _of_number(written: bytes, bounds: Bounds) -> list[bytes] | None:
    if not _may_reach(written, bounds):
        return []
    low, high = bounds
    digits = written.removeprefix(b"-")
    value = int(written) if digits else None
    if value is not None and (low is None or value >= low) and (high is None or value <= high):
        return None
    return [one for one in _DIGITS if _may_reach(written + one, bounds)]


def _may_reach(written: bytes, bounds: Bounds) -> bool:
    """Return True if some digits make a whole number within bounds."""
    low, high = bounds
    digits = written.removeprefix(b"-")
    if digits != written:
        low, high = _negative(high), _negative(low)
    if not digits:
        return high is None or high >= 1
    if not digits.isdigit() or (digits[:1] == b"0" and len(digits) > 1):
        return False
    least = most = int(digits)
    if least == 0 or high is None:
        return (low is None or least >= low) or (least > 0 and high is None)
    while least <= high:
        if low is None or most >= low:
            return True
        least, most = least * 10, most * 10 + 9
    return False


def _negative(bound: Fraction | None) -> Fraction | None:
    return None if bound is None else -bound


def _of_string(written: bytes, following: Callable[[str], list[str] | None]) -> list[bytes] | None:
    """Return what may follow in a string: a part of it, or its end."""
    cut = _BROKEN_ESCAPE.search(written)
    inner = (written[1 : cut.start(1)] if cut else written[1:]).decode("utf-8", "ignore")
    found = following(json.loads(f'"{inner}"') if "\\" in inner else inner)
    if not found:
        return found  # type: ignore[return-value]
    is_whole = cut is None and written[1:] == inner.encode()
    return [json.dumps(one, ensure_ascii=False)[1:-1].encode() or b'"' for one in found] if is_whole else None
