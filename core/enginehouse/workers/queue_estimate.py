"""Queue estimate of an engine, kept in the server process: waiting and running requests, and the pace of completion.

With it, a request that cannot be served soon is refused at once, before its prompt is rendered, with the time after
which to try again. The worker still decides: a request that passes this check may be refused there.
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
"""Share of the queue that one named caller may fill if the settings give none, so that others still find a place."""

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
    """Running mean of the delay of requests beyond the expected wait, and its mean deviation.

    Answers that began together end together, so a slot may become free up to a whole answer later than the pace
    predicts.

    Source: the round-trip time estimator of RFC 6298.
    """

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, late_s: float) -> None:
        self.deviation_s += (abs(late_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (late_s - self.mean_s) / 8

    @property
    def likely_s(self) -> float:
        """Upper estimate of the delay, rarely exceeded."""
        return max(0.0, self.mean_s + 4 * self.deviation_s)


class Backlog:
    """The requests of one engine. Used on the event loop.

    Args:
        settings: number of slots and limits of the queue.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._lateness = _Lateness()
        self._pace = Throughput(clock)
        # Measured only while all slots are taken: the engine's capacity, not the demand.
        self._full_pace = Throughput(clock)

    def __len__(self) -> int:
        return len(self._entries)

    # -- updates -----------------------------------------------------------------------------------

    def enter(self, request_id: str, caller: str, priority: int) -> None:
        """A request was sent to the engine; no effect if it has entered before."""
        if request_id not in self._entries:
            expected_s = self._expected_wait_s(caller, priority)
            self._entries[request_id] = _Entry(caller, priority, self._clock(), expected_s)
            self._run()

    def start(self, request_id: str) -> None:
        """The request has left the queue."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.is_running:
            entry.is_running = True
            self._note_wait(entry)

    def leave(self, request_id: str, *, is_served: bool = False) -> None:
        """The request has ended or was refused; no effect if it has left before."""
        if self._entries.pop(request_id, None) is not None:
            if is_served:
                self._pace.count()
                if len(self._entries) + 1 >= self._settings.slots:
                    self._full_pace.count()
            self._run()

    def clear(self) -> None:
        """All requests have ended."""
        self._entries.clear()
        self._run()

    def _note_wait(self, entry: _Entry) -> None:
        """Record the difference between the actual and the expected wait of a request."""
        if entry.expected_s is not None:
            self._lateness.add(self._clock() - entry.since_s - entry.expected_s)

    def _run(self) -> None:
        self._pace.run(bool(self._entries))
        self._full_pace.run(len(self._entries) >= self._settings.slots)

    # -- estimates ---------------------------------------------------------------------------------

    def check(self, caller: str, priority: int, queue_timeout_s: float | None) -> None:
        """Refuse a request that does not fit into the queue, or that would wait longer than its limit.

        Raises:
            Overloaded: the queue or the caller's share of it is full, or the expected wait is too long.
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
        """Return the worker's error; overload errors gain a Retry-After, and their cause: the caller or others."""
        entry = self._entries.get(request_id)
        if isinstance(error, QueueTimeout):
            if entry is not None:
                self._note_wait(entry)  # the actual wait would have been even longer
            return QueueTimeout(error.message, self.retry_after_s)
        if not isinstance(error, Overloaded):
            return error
        return self._full(entry.caller if entry is not None else "", error.message)

    @property
    def retry_after_s(self) -> float:
        """Seconds until half of the waiting requests will have begun, at the recent pace; 1 if the pace is unknown."""
        per_s = self._full_pace.per_s or self._pace.per_s
        if not per_s:
            return 1.0
        num_waiting = sum(not entry.is_running for entry in self._entries.values())
        return min(_MAX_RETRY_S, (num_waiting / 2 + 1) / per_s)

    def _share(self, caller: str) -> int:
        """Queue places for one caller; callers without a name cannot be told apart, so all places are open to them."""
        most = self._settings.max_queue
        if not caller:
            return most
        share = self._settings.max_queue_per_caller
        return min(most, share) if share is not None else max(min(1, most), int(most * _SHARE_PER_CALLER))

    def _full(self, caller: str, message: str) -> Overloaded:
        """Return the refusal: the caller's own fault if it has at least an equal share of the requests."""
        counts = Counter(entry.caller for entry in self._entries.values())
        is_own_doing = counts[caller] * len(counts) >= len(self._entries)
        return (Overloaded if is_own_doing else ModelOverloaded)(message, self.retry_after_s)

    def _expected_wait_s(self, caller: str, priority: int) -> float | None:
        """Expected wait of a request in seconds, as callers take turns; None if the full-load pace is unknown."""
        per_s = self._full_pace.per_s
        if not per_s:
            return None
        waiting = [entry for entry in self._entries.values() if not entry.is_running]
        counts = Counter(entry.caller for entry in waiting if entry.priority <= priority)
        own = counts.pop(caller, 0)
        num_before = own + sum(min(count, own + 1) for count in counts.values())
        is_full = len(self._entries) - len(waiting) >= self._settings.slots
        return (num_before + is_full) / per_s if num_before or is_full else 0.0
