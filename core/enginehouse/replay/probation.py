"""Which request kills workers: found with certainty, and without refusing any other.

After a death everything that the worker was working on is under suspicion. The suspects go back one at a time, each
alone in the worker, until it has come well past the point where it was; then it steps aside for the next one, and when
all have passed, all go on together. A worker that dies while a suspect is alone in it has been killed by that one.

The first suspects are the likeliest: those that had come least far, the latest arrival first. When the culprit is
found, the suspicion against the others ends. What had been queued was never under suspicion, and what arrives
meanwhile waits.

A worker that somebody killed from outside (``kill -9``, with memory to spare) has died of nothing that it did: that is
held against nobody, twice. Then it is, since a watcher that kills what takes too much memory looks the same from here.

"Well past" is further each time a request comes under suspicion: one that kills its worker not at once but again and
again, some way on, is alone with it sooner or later.

Pure bookkeeping: knows no event loop and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["_MARGIN_FACTOR", "_MARGIN_TOKENS", "_MAX_FORGIVEN", "Probation", "Suspect"]

_MARGIN_TOKENS = 8
"""How far past its point a suspect must come the first time. Tokens that are drawn but not told of when a worker dies
are few: an unfinished character, the beginning of a stop string."""

_MARGIN_FACTOR = 4
"""How much further it must come each further time."""

_MAX_FORGIVEN = 2
"""Deaths from outside that are not held against a request that was in the worker."""


class Suspect(Protocol):
    """A request, as far as it matters here.

    Attributes:
        arrival: grows from request to request.
        num_suspicions: how often it was under suspicion; written by :class:`Probation`, as is the next.
        num_forgiven: how often its worker was killed from outside, which it was not suspected of.
    """

    arrival: int
    num_suspicions: int
    num_forgiven: int

    @property
    def num_tokens(self) -> int:
        """How far it has come."""
        ...


class Probation:
    """The suspects of one model, the one on trial first."""

    def __init__(self) -> None:
        self._suspects: list[Suspect] = []
        self._goal = 0

    @property
    def trial(self) -> Suspect | None:
        """The suspect that has the worker to itself; None when nobody is under suspicion."""
        return self._suspects[0] if self._suspects else None

    def admits(self, request: Suspect) -> bool:
        """Whether a request may be in the worker now."""
        return not self._suspects or request is self._suspects[0]

    def died(self, working: Sequence[Suspect], *, from_outside: bool = False) -> Suspect | None:
        """The worker died while it worked on these requests; returns the culprit when it is known."""
        if from_outside:
            working = [request for request in working if not _forgive(request)]
        trial = self.trial
        if trial is not None and trial in working:
            self._suspects.clear()
            return trial
        for request in working:
            request.num_suspicions += 1
        self._suspects += working
        self._suspects.sort(key=lambda request: (request.num_tokens, -request.arrival))
        self._begin_trial()
        return None

    def progressed(self, request: Suspect) -> bool:
        """A request has come further; True when it has passed its trial and must step aside for the next one."""
        if request is not self.trial or request.num_tokens < self._goal:
            return False
        self._next()
        return bool(self._suspects)

    def left(self, request: Suspect) -> None:
        """A request has ended, in whatever way."""
        if request is self.trial:
            self._next()
        elif request in self._suspects:
            self._suspects.remove(request)

    def _next(self) -> None:
        del self._suspects[0]
        self._begin_trial()

    def _begin_trial(self) -> None:
        if (trial := self.trial) is not None:
            margin = _MARGIN_TOKENS * _MARGIN_FACTOR ** (trial.num_suspicions - 1)
            self._goal = trial.num_tokens + margin


def _forgive(request: Suspect) -> bool:
    """Whether a request is not suspected of a death from outside."""
    if request.num_forgiven >= _MAX_FORGIVEN:
        return False
    request.num_forgiven += 1
    return True
