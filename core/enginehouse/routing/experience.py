"""How models have fared lately: failures in a row, and times to the first token.

This is the circuit breaker: a model that fails too often in a row is left aside for a while; then one request after the
other may try it again, and its next success closes the circuit. Knows no models, only their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import define, field

from enginehouse.router_settings import RouterSettings

__all__ = ["Experience"]

_WEIGHT = 0.3
"""Of the newest time in the average."""


@define
class _Past:
    num_failures: int = 0
    failed_s: float = 0.0
    first_token_s: float | None = None


@define
class Experience:
    """One per server. ``clock`` gives seconds."""

    settings: RouterSettings
    clock: Callable[[], float] = time.monotonic
    _by_model: dict[str, _Past] = field(factory=dict)

    def has_failed(self, model: str) -> bool:
        """Whether the model is left aside now."""
        past = self._by_model.get(model)
        if past is None or past.num_failures < self.settings.max_failures:
            return False
        return self.clock() - past.failed_s < self.settings.pause_s

    def first_token_s(self, model: str) -> float | None:
        """The average time to the first token; None before there was one."""
        past = self._by_model.get(model)
        return past.first_token_s if past is not None else None

    def failed(self, model: str) -> None:
        """The model could not answer a request that it should have answered."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures += 1
        past.failed_s = self.clock()

    def answered(self, model: str, first_token_s: float) -> None:
        """The model has begun an answer."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures = 0
        last = past.first_token_s
        past.first_token_s = first_token_s if last is None else last + _WEIGHT * (first_token_s - last)
