"""Limits the constraints of one value in the grammar: the library intersects automata, which is slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from attrs import define, field

from enginehouse_llguidance.schemas.places import ValuePath
from enginehouse_llguidance.schemas.strings import MAX_PATTERNS

__all__ = ["Joins"]

_Value = TypeVar("_Value")

_MAX_MULTIPLES = 100_000  # number of distinguished remainders: 0.6 s
_MAX_PATHS = 500


@define
class Joins:
    """Patterns and multiples of combined schemas, grouped by the value that they restrict."""

    max_patterns: int = MAX_PATTERNS
    patterns: dict[ValuePath, set[str]] = field(factory=dict)
    multiples: dict[ValuePath, set[float]] = field(factory=dict)

    def adds_patterns(self, path: ValuePath, patterns: set[str]) -> bool:
        """Add patterns; False if that is too many for one value, so that they have to be left out."""
        known = _of_meeting(path, self.patterns)
        if len(known | patterns) > self.max_patterns or (
            path not in self.patterns and len(self.patterns) >= _MAX_PATHS
        ):
            return False
        self.patterns.setdefault(path, set()).update(patterns)
        return True

    def adds_multiple(self, path: ValuePath, value: float) -> bool:
        """Add a value of ``multipleOf``; False if those of one number are too many, so that it has to be left out."""
        known = _of_meeting(path, self.multiples)
        if math.prod(known | {value}) > _MAX_MULTIPLES:
            return False
        if path not in self.multiples and len(self.multiples) >= _MAX_PATHS:
            return False
        self.multiples.setdefault(path, set()).add(value)
        return True


def _of_meeting(path: ValuePath, found: Mapping[ValuePath, set[_Value]]) -> set[_Value]:
    """Return what was added for the paths that may lead to the same value."""
    return {one for other in _meeting(path, found) for one in found[other]}


def _meeting(path: ValuePath, paths: Iterable[ValuePath]) -> Iterator[ValuePath]:
    """Yield the paths that may lead to the same value; None in a path is any name or index."""
    for other in paths:
        if len(other) == len(path) and all(
            left is None or right is None or left == right for left, right in zip(path, other, strict=True)
        ):
            yield other
