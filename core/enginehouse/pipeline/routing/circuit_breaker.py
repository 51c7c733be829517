"""Circuit breaker per model: consecutive failures, and times to the first token.

A model that fails too often in a row is skipped for a pause. After that, one request may try it again while the others
still skip it; an answer to that request closes the circuit. Knows models only by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import define, field

from enginehouse.contract.errors import (
    EngineError,
    EnginehouseError,
    ModelNotReady,
    ModelUnloaded,
    QueueTimeout,
    RequestKillsWorker,
)
from enginehouse.settings.features import RouterSettings

_WEIGHT = 0.3
"""Weight of the newest time in the moving average."""

_NOT_COUNTED = (RequestKillsWorker, ModelNotReady, ModelUnloaded)
"""Engine errors caused by the request, by the operator, or by a load in progress."""


@define(eq=False)
class OutcomeRecorder:
    """Records the outcome of one request at one model.

    Implements :class:`enginehouse.recovery.generation.OutcomeObserver`.
    """

    model: str
    began_s: float
    _circuit_breaker: CircuitBreaker
    _has_failed: bool = False

    def answered(self) -> None:
        """The model has started an answer. It may still fail."""
        self._circuit_breaker.answered(self.model, self._circuit_breaker.clock() - self.began_s)

    def raised(self, error: EnginehouseError) -> None:
        """Record the outcome of an error: a failure only if the model is at fault."""
        if isinstance(error, EngineError | QueueTimeout) and not isinstance(error, _NOT_COUNTED):
            self.failed()
        else:
            self.ended()

    def failed(self) -> None:
        """Record that the model failed to answer and is at fault; counted once."""
        if not self._has_failed:
            self._has_failed = True
            self._circuit_breaker.failed(self.model)

    def ended(self) -> None:
        """Record the end of a request without an outcome. No effect after another one."""
        self._circuit_breaker.left(self)


@define
class _Past:
    num_failures: int = 0
    failed_s: float = 0.0
    first_token_s: float | None = None
    probe: OutcomeRecorder | None = None  # the single request whose outcome decides whether the circuit closes


@define
class CircuitBreaker:
    """Circuit breakers of all models of a server. ``clock`` returns seconds."""

    settings: RouterSettings
    clock: Callable[[], float] = time.monotonic
    _by_model: dict[str, _Past] = field(factory=dict)

    def has_failed(self, model: str) -> bool:
        """True if the circuit is open: the model is paused, or the pause is over and one request, the probe, is
        running.

        A probe without an outcome expires after the length of a pause.
        """
        past = self._by_model.get(model)
        if past is None or not self._is_open(past):
            return False
        since_s = past.failed_s if past.probe is None else max(past.failed_s, past.probe.began_s)
        return self.clock() - since_s < self.settings.pause_s

    def begin(self, model: str) -> OutcomeRecorder:
        """Return the recorder of a new request to the model; one of its methods must be called at the end."""
        recorder = OutcomeRecorder(model, self.clock(), self)
        past = self._by_model.setdefault(model, _Past())
        if self._is_open(past) and not self.has_failed(model):
            past.probe = recorder
        return recorder

    def first_token_s(self, model: str) -> float | None:
        """Return the average time to the first token; None before there was one."""
        past = self._by_model.get(model)
        return past.first_token_s if past is not None else None

    def failed(self, model: str) -> None:
        """Record that the model could not answer a request that it should have answered."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures += 1
        past.failed_s, past.probe = self.clock(), None

    def answered(self, model: str, first_token_s: float) -> None:
        """Record that the model has started an answer."""
        past = self._by_model.setdefault(model, _Past())
        past.num_failures, past.probe = 0, None
        last = past.first_token_s
        past.first_token_s = first_token_s if last is None else last + _WEIGHT * (first_token_s - last)

    def left(self, recorder: OutcomeRecorder) -> None:
        """Record a request without an outcome; if it was the probe, the next request may become the probe."""
        past = self._by_model[recorder.model]
        if past.probe is recorder:
            past.probe = None

    def _is_open(self, past: _Past) -> bool:
        return past.num_failures >= self.settings.max_failures
