"""How models have fared lately: failures in a row, and times to the first token.

This is the circuit breaker: a model that fails too often in a row is left aside for a while. Then one request may try
it again, and the others go on without it until that one has an answer, which closes the circuit. Knows no models, only
their names, and no errors: who tries a model decides what is a failure of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import define, field

from enginehouse.settings.optimisations import RouterSettings

__all__ = ["Experience", "Trial"]

_WEIGHT = 0.3
"""Of the newest time in the average."""


@define(eq=False)
class Trial:
    """One request at one model, from its submission on: says what the model made of it."""

    model: str
    began_s: float
    _experience: Experience
    _has_failed: bool = False

    def answered(self) -> None:
        """The model has begun an answer. It may still fail."""
        self._experience.answered(self.model, self._experience.clock() - self.began_s)

    def failed(self) -> None:
        """The model could not answer, and is to blame; counted once."""
        if not self._has_failed:
            self._has_failed = True
            self._experience.failed(self.model)

    def ended(self) -> None:
        """Nothing more will come of it; that says nothing about the model. Harmless after everything else."""
        self._experience.left(self)


@define
class _Past:
    num_failures: int = 0
    failed_s: float = 0.0
    first_token_s: float | None = None
    test: Trial | None = None  # by which it is decided whether the circuit closes; there is one at a time


@define
class Experience:
    """One per server. ``clock`` gives seconds."""

    settings: RouterSettings
    clock: Callable[[], float] = time.monotonic
    _by_model: dict[str, _Past] = field(factory=dict)

    def has_failed(self, model: str) -> bool:
        """Whether the model is left aside now: it pauses, or its pause is over and a request tests it already.

        A test that says nothing for as long as a pause is not waited for any longer.
        """
        past = self._by_model.get(model)
        if past is None or not self._is_open(past):
            return False
        since_s = past.failed_s if past.test is None else max(past.failed_s, past.test.began_s)
        return self.clock() - since_s < self.settings.pause_s

    def begin(self, model: str) -> Trial:
        """A request is about to try the model; call one of the trial's methods, however that ends."""
        trial = Trial(model, self.clock(), self)
        past = self._by_model.setdefault(model, _Past())
        if self._is_open(past) and not self.has_failed(model):
            past.test = trial
        return trial

    def first_token_s(self, model: str) -> float | None:
        """The average time to the first token; None before there was one."""
        past = self._by_model.get(model)
        return past.first_token_s if past is not None else None

    def failed(self, model: str) -> None:
        """The model could not answer a request that it should have answered."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures += 1
        past.failed_s, past.test = self.clock(), None

    def answered(self, model: str, first_token_s: float) -> None:
        """The model has begun an answer."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures, past.test = 0, None
        last = past.first_token_s
        past.first_token_s = first_token_s if last is None else last + _WEIGHT * (first_token_s - last)

    def left(self, trial: Trial) -> None:
        """A trial has ended without a word about the model; if it was the test, the next request may be."""
        past = self._by_model[trial.model]
        if past.test is trial:
            past.test = None

    def _is_open(self, past: _Past) -> bool:
        return past.num_failures >= self.settings.max_failures
