"""What saving, loading and computing a token cost on this machine: averages of what was measured."""

from __future__ import annotations

from attrs import define, field

__all__ = ["Pace", "SecondsPerToken"]

_NEWEST_SHARE = 0.3


@define
class SecondsPerToken:
    """An average in which newer measurements count more; None before the first."""

    value: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take one measurement in."""
        new = seconds / num_tokens
        self.value = new if self.value is None else self.value + _NEWEST_SHARE * (new - self.value)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens will take."""
        return None if self.value is None else num_tokens * self.value


@define
class Pace:
    """The three that decide whether the disk is worth it."""

    saving: SecondsPerToken = field(factory=SecondsPerToken)
    loading: SecondsPerToken = field(factory=SecondsPerToken)
    computing: SecondsPerToken = field(factory=SecondsPerToken)

    def pays(self, num_loaded: int, num_saved: int) -> bool:
        """Whether loading so many tokens is quicker than computing so many; True while one of them is unknown."""
        loading, computing = self.loading.estimate(num_loaded), self.computing.estimate(num_saved)
        return loading is None or computing is None or loading <= computing
