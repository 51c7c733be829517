"""Measured values, one per round, and the comparisons that a benchmark makes between them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field, frozen

from .statistics import Estimate, estimate, estimate_ratio

__all__ = ["Comparison", "Key", "Record"]

_MIN_ROUNDS = 5


@frozen
class Key:
    """What a value is about: ``subject`` (who) in ``scenario`` (doing what), by ``metric`` (name and unit)."""

    scenario: str
    subject: str
    metric: str


@frozen
class Comparison:
    """What matters: ``key`` over ``baseline`` (None: the value itself), at least, or at most, ``target``."""

    key: Key
    baseline: Key | None = None
    target: float | None = None
    target_is_upper: bool = False

    def __str__(self) -> str:
        if self.baseline is None:
            return f"{self.key.scenario}: {self.key.subject}"
        same_scenario = self.key.scenario == self.baseline.scenario
        if self.key.subject == self.baseline.subject:
            return f"{self.key.subject}: {self.key.scenario} / {self.baseline.scenario}"
        baseline = self.baseline.subject if same_scenario else f"{self.baseline.subject}, {self.baseline.scenario}"
        return f"{self.key.scenario}: {self.key.subject} / {baseline}"

    def verdict(self, ratio: Estimate) -> str:
        """``reached``, ``missed``, or ``unclear`` when the interval holds the target; empty without a target.

        Fewer than five rounds say too little.
        """
        if self.target is None:
            return ""
        if ratio.num_rounds < _MIN_ROUNDS:
            return "too few rounds"
        if ratio.low < self.target < ratio.high:
            return "unclear"
        reached = ratio.median <= self.target if self.target_is_upper else ratio.median >= self.target
        return "reached" if reached else "missed"


@define
class Record:
    """All values of one benchmark, in the order in which they were first measured."""

    values: dict[Key, list[float]] = field(factory=dict)

    def add(self, key: Key, value: float) -> None:
        """Append one round's value."""
        self.values.setdefault(key, []).append(value)

    def estimates(self) -> Iterator[tuple[Key, Estimate]]:
        """Every key with its estimate."""
        for key, values in self.values.items():
            yield key, estimate(values)

    def compare(self, comparison: Comparison) -> Estimate:
        """The paired ratio, or the value itself where there is no baseline."""
        values = self.values[comparison.key]
        if comparison.baseline is None:
            return estimate(values)
        return estimate_ratio(values, self.values[comparison.baseline])
