"""What an engine has to do, as the server's process sees it: who waits, who runs, and how fast that goes.

With it a request that cannot be served soon is refused at once, before its prompt is rendered, and is told when to come
again. The worker itself stays the judge: what this module lets in may still be refused there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from attrs import define

from enginehouse.contract.errors import EnginehouseError, ModelOverloaded, Overloaded, QueueTimeout
from enginehouse.contract.types import EngineSettings
from enginehouse.engine.throughput import Throughput

__all__ = ["Backlog"]

_SHARE_PER_CALLER = 0.75
"""Of the queue, that one named caller may fill where the settings say nothing: others still find a place."""

_MAX_RETRY_S = 600.0


@define
class _Entry:
    caller: str
    priority: int
    since_s: float
    expected_s: float | None
    is_running: bool = False


@define
class _Lateness:
    """By how much requests began later than expected: the mean, and the mean deviation from it, of late.

    Answers that began together end together, so a place may come up to a whole answer later than the pace says.

    Source: the estimator of round trips in RFC 6298.
    """

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, late_s: float) -> None:
        self.deviation_s += (abs(late_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (late_s - self.mean_s) / 8

    @property
    def likely_s(self) -> float:
        """A request is rarely later than this."""
        return max(0.0, self.mean_s + 4 * self.deviation_s)


class Backlog:
    """The requests of one engine. Used on the event loop.

    Args:
        settings: slots and sizes of the queue.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._lateness = _Lateness()
        self._pace = Throughput(clock)
        # While all slots are taken: what the engine can do, not what was asked of it.
        self._full_pace = Throughput(clock)

    def __len__(self) -> int:
        return len(self._entries)

    # -- what happens ------------------------------------------------------------------------------

    def enter(self, request_id: str, caller: str, priority: int) -> None:
        """A request is on its way to the engine; harmless when it has entered before."""
        if request_id not in self._entries:
            expected_s = self._expected_wait_s(caller, priority)
            self._entries[request_id] = _Entry(caller, priority, self._clock(), expected_s)
            self._run()

    def start(self, request_id: str) -> None:
        """It has left the queue."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.is_running:
            entry.is_running = True
            self._note_wait(entry)

    def leave(self, request_id: str, *, is_served: bool = False) -> None:
        """It has ended or was refused; harmless when it has left before."""
        if self._entries.pop(request_id, None) is not None:
            if is_served:
                self._pace.count()
                if len(self._entries) + 1 >= self._settings.slots:
                    self._full_pace.count()
            self._run()

    def clear(self) -> None:
        """All have ended."""
        self._entries.clear()
        self._run()

    def _note_wait(self, entry: _Entry) -> None:
        """It has waited long enough to tell how good the expectation was."""
        if entry.expected_s is not None:
            self._lateness.add(self._clock() - entry.since_s - entry.expected_s)

    def _run(self) -> None:
        self._pace.run(bool(self._entries))
        self._full_pace.run(len(self._entries) >= self._settings.slots)

    # -- what follows from it ----------------------------------------------------------------------

    def check(self, caller: str, priority: int, queue_timeout_s: float | None) -> None:
        """Refuse a request that the queue has no place for, or that would wait longer than it may.

        Raises:
            Overloaded: the queue is full, or the caller's share of it is.
        """
        settings = self._settings
        own = sum(entry.caller == caller for entry in self._entries.values())
        if len(self._entries) >= settings.slots + settings.max_queue or own >= settings.slots + self._share(caller):
            raise self._full(caller, "The queue of this model is full; try again in a moment.")
        expected_s = self._expected_wait_s(caller, priority)
        if queue_timeout_s is None or not expected_s:
            return
        likely_s = expected_s + self._lateness.likely_s
        if likely_s > queue_timeout_s:
            message = f"This model may need {likely_s:.0f} s to begin, longer than {queue_timeout_s:g} s"
            raise ModelOverloaded(f"{message} (queue_timeout_s); try again later.", likely_s - queue_timeout_s)

    def explain(self, error: EnginehouseError, request_id: str) -> EnginehouseError:
        """The worker's error; a refusal for want of room with whose doing it is and when to come again."""
        entry = self._entries.get(request_id)
        if isinstance(error, QueueTimeout):
            if entry is not None:
                self._note_wait(entry)  # it would have waited still longer
            return QueueTimeout(error.message, self.retry_after_s)
        if not isinstance(error, Overloaded):
            return error
        return self._full(entry.caller if entry is not None else "", error.message)

    @property
    def retry_after_s(self) -> float:
        """Seconds in which half of what waits now will have begun, at the pace of late; 1 while none is known."""
        per_s = self._full_pace.per_s or self._pace.per_s
        if not per_s:
            return 1.0
        num_waiting = sum(not entry.is_running for entry in self._entries.values())
        return min(_MAX_RETRY_S, (num_waiting / 2 + 1) / per_s)

    def _share(self, caller: str) -> int:
        """Places in the queue for one caller; unnamed callers are told from nobody, so all may be theirs."""
        most = self._settings.max_queue
        if not caller:
            return most
        share = self._settings.max_queue_per_caller
        return min(most, share) if share is not None else max(min(1, most), int(most * _SHARE_PER_CALLER))

    def _full(self, caller: str, message: str) -> Overloaded:
        """The refusal: its own fault where the caller has at least its part of what is in."""
        counts = Counter(entry.caller for entry in self._entries.values())
        is_own_doing = counts[caller] * len(counts) >= len(self._entries)
        return (Overloaded if is_own_doing else ModelOverloaded)(message, self.retry_after_s)

    def _expected_wait_s(self, caller: str, priority: int) -> float | None:
        """How long a request would wait, as callers take turns; None while the pace with full slots is unknown."""
        per_s = self._full_pace.per_s
        if not per_s:
            return None
        waiting = [entry for entry in self._entries.values() if not entry.is_running]
        counts = Counter(entry.caller for entry in waiting if entry.priority <= priority)
        own = counts.pop(caller, 0)
        num_before = own + sum(min(count, own + 1) for count in counts.values())
        is_full = len(self._entries) - len(waiting) >= self._settings.slots
        return (num_before + is_full) / per_s if num_before or is_full else 0.0
