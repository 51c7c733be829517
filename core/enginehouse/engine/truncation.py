"""Core's own steps from a row of logits to the tokens that may be drawn: top-k, top-p, min-p, and the temperature.

Called by the sampler, in the order of its chain. The first truncation reads the row of logits; later ones thin
out what the steps before them left. A temperature that comes first is no step: the row is read at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attrs import frozen

from enginehouse.engine.candidates import Head, LogitRow, bounded_by_mass, bounded_by_ratio

__all__ = ["MinP", "Step", "Temperature", "TopK", "TopP", "Uniform", "bounded_temperature"]

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-30, 1e30  # beyond, float32 arithmetic leaves its range

Uniform = Callable[[str], float]
"""``number(purpose)`` is a replayable number in [0, 1)."""


class Step(Protocol):
    """One step of one sequence."""

    @property
    def name(self) -> str:
        """What requests call it in ``samplers``."""
        ...

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """The row, changed or not, and what is left of it; a head of None is all of the row."""
        ...


@frozen
class TopK:
    """Keeps the ``count`` most probable tokens."""

    count: int
    name: str = "top_k"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.top(self.count) if head is None else head[: self.count]


@frozen
class TopP:
    """Keeps the smallest number of most probable tokens that hold ``mass`` of what is left."""

    mass: float
    name: str = "top_p"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.nucleus(self.mass) if head is None else bounded_by_mass(head, self.mass)


@frozen
class MinP:
    """Keeps tokens with at least ``ratio`` of the most probable remaining token's probability."""

    ratio: float
    name: str = "min_p"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.at_least(self.ratio) if head is None else bounded_by_ratio(head, self.ratio)


@frozen
class Temperature:
    """Divides logits by ``value``, which is greater than 0, after steps that came before."""

    value: float
    name: str = "temperature"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """See :class:`Step`."""
        return row.at(self.value, head)


def bounded_temperature(value: float) -> float:
    """``value`` within what float32 can divide by; nearly nothing is all but greedy."""
    return min(max(value, _LOWEST_TEMPERATURE), _HIGHEST_TEMPERATURE)
