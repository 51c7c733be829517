"""Limits the constraints that may apply to one value at once: the library intersects automata, which is slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from attrs import define, field

from enginehouse_llguidance.schemas.places import ValuePath
from enginehouse_llguidance.schemas.problems import SchemaProblem

__all__ = ["Joins"]

_MAX_PATTERNS = 5  # measured: 10 take 0.2 s, 12 take 3 s
_MAX_MULTIPLES = 100_000  # number of distinguished remainders: 0.6 s
_MAX_PATHS = 500


@define
class Joins:
    """Patterns and multiples of combined schemas, grouped by the value that they restrict."""

    patterns: dict[ValuePath, set[str]] = field(factory=dict)
    multiples: dict[ValuePath, set[float]] = field(factory=dict)

    def add_pattern(self, path: ValuePath, pattern: str) -> None:
        """Add a pattern."""
        self.patterns.setdefault(path, set()).add(pattern)

    def add_multiple(self, path: ValuePath, value: float) -> None:
        """Add a value of ``multipleOf``."""
        self.multiples.setdefault(path, set()).add(value)

    def check(self) -> None:
        """Raise SchemaProblem if too many may apply to one value."""
        if len(self.patterns) > _MAX_PATHS or len(self.multiples) > _MAX_PATHS:
            raise SchemaProblem("", "too many patterns and multiples in schemas that are joined")
        for path in self.patterns:
            if len({one for other in _meeting(path, self.patterns) for one in self.patterns[other]}) > _MAX_PATTERNS:
                raise SchemaProblem("", f"more than {_MAX_PATTERNS} patterns may hold for the same value")
        for path in self.multiples:
            values = {value for other in _meeting(path, self.multiples) for value in self.multiples[other]}
            if math.prod(values) > _MAX_MULTIPLES:
                raise SchemaProblem("", "multipleOf: too many different values may hold for the same number")


def _meeting(path: ValuePath, paths: Iterable[ValuePath]) -> Iterator[ValuePath]:
    """Yield the paths that may lead to the same value; None in a path is any name or index."""
    for other in paths:
        if len(other) == len(path) and all(
            left is None or right is None or left == right for left, right in zip(path, other, strict=True)
        ):
            yield other
