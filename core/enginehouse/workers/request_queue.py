"""Count of a model's waiting and running requests, kept in the server process, and the pace of completion.

It holds and orders no requests: their order is that of the scheduler in the worker. It alone decides which are too
many: of one caller or of all, in number, in tokens, or in the time to wait. It outlives the model's
workers and counts everything that needs one: requests that wait for a load or a restart, those whose prompts are
rendered, those in the worker, and those that wait for the next worker because the last one died. So a request that
cannot be served soon is refused at once, with the time after which to try again; the worker refuses none for load.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from attrs import define

from enginehouse.contract.errors import EnginehouseError, ModelOverloaded, Overloaded, QueueTimeout
from enginehouse.settings.limits import LimitsSettings

_SHARE_PER_CALLER = 0.75
"""Share of the queue that one named caller may fill if the settings give none, so that others still find a place."""

_MAX_RETRY_S = 600.0

_FULL = "The queue of this model is full; try again in a moment."


@define
class _Entry:
    caller: str
    priority: int
    since_s: float
    expected_s: float | None
    is_running: bool = False
    num_tokens: int = 0  # 0 until the worker has tokenized it


@define
class _ExcessWait:
    """Running mean of the delay of requests beyond the expected wait, and its mean deviation.

    Answers that began together end together, so a slot may become free up to a whole answer later than the pace
    predicts.

    Source: the round-trip time estimator of RFC 6298.
    """

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, excess_s: float) -> None:
        self.deviation_s += (abs(excess_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (excess_s - self.mean_s) / 8

    @property
    def likely_s(self) -> float:
        """Upper estimate of the delay, rarely exceeded."""
        return max(0.0, self.mean_s + 4 * self.deviation_s)


class RequestQueue:
    """The requests of one model. Used on the event loop.

    Args:
        slots: number of sequences that the model decodes concurrently.
        limits: maximum numbers of waiting requests and tokens.
        clock: seconds, monotonic.
    """

    def __init__(self, slots: int, limits: LimitsSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._limits = limits
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._excess_wait = _ExcessWait()
        self._pace = Throughput(clock)
        # Measured only while all slots are taken: the engine's capacity, not the demand.
        self._full_pace = Throughput(clock)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    # -- updates -----------------------------------------------------------------------------------

    def enter(self, request_id: str, caller: str, priority: int) -> None:
        """A request needs the model from now on; no effect if it has entered before."""
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
                if len(self._entries) + 1 >= self._slots:
                    self._full_pace.count()
            self._run()

    def _note_wait(self, entry: _Entry) -> None:
        """Record the difference between the actual and the expected wait of a request."""
        if entry.expected_s is not None:
            self._excess_wait.add(self._clock() - entry.since_s - entry.expected_s)

    def _run(self) -> None:
        self._pace.run(bool(self._entries))
        self._full_pace.run(len(self._entries) >= self._slots)

    # -- refusals ----------------------------------------------------------------------------------

    def check(self, caller: str, priority: int, queue_timeout_s: float | None = None, why: str = _FULL) -> None:
        """Refuse a request that does not fit into the queue, or that would wait longer than its limit.

        Args:
            caller: the caller of the request.
            priority: its priority.
            queue_timeout_s: maximum time in the queue, if any.
            why: the message if the queue is full.

        Raises:
            Overloaded: the queue or the caller's share of it is full, or the expected wait is too long.
        """
        own = sum(entry.caller == caller for entry in self._entries.values())
        if len(self._entries) >= self._slots + self._limits.max_queue or own >= self._slots + self._share(caller):
            raise self._full(caller, why)
        expected_s = self._expected_wait_s(caller, priority)
        if queue_timeout_s is None or not expected_s:
            return
        likely_s = expected_s + self._excess_wait.likely_s
        if likely_s > queue_timeout_s:
            message = f"This model may need {likely_s:.0f} s to begin, longer than {queue_timeout_s:g} s"
            raise ModelOverloaded(f"{message} (queue_timeout_s); try again later.", likely_s - queue_timeout_s)

    def check_waiters(self, num_waiters: int, why: str, retry_after_s: float) -> None:
        """Refuse a further request that would wait for the model to be loaded.

        Args:
            num_waiters: number of requests that wait for that; they enter when it is loaded.
            why: the message.
            retry_after_s: estimated seconds until it is loaded.

        Raises:
            ModelOverloaded: together with those that have entered, they are as many as the model may have.
        """
        if len(self._entries) + num_waiters >= self._slots + self._limits.max_queue:
            raise ModelOverloaded(why, retry_after_s)

    def check_tokens(self, request_id: str, num_tokens: int) -> None:
        """Note the length of a tokenized prompt; with no other one waiting, any length is accepted.

        Raises:
            Overloaded: with it, more than ``max_queue_tokens`` would wait.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.is_running:
            return
        num_before = sum(other.num_tokens for other in self._entries.values() if not other.is_running)
        if num_before and num_before + num_tokens > self._limits.max_queue_tokens:
            raise self._full(entry.caller, "Too many prompt tokens wait for this model; try again in a moment.")
        entry.num_tokens = num_tokens

    # -- estimates ---------------------------------------------------------------------------------

    def explain(self, error: EnginehouseError, request_id: str) -> EnginehouseError:
        """Return the worker's error; one about a time-out in the queue gains a Retry-After."""
        if not isinstance(error, QueueTimeout):
            return error
        entry = self._entries.get(request_id)
        if entry is not None:
            self._note_wait(entry)  # the actual wait would have been even longer
        return QueueTimeout(error.message, self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """Seconds until half of the waiting requests will have started, at the recent pace; 1 if it is unknown."""
        per_s = self._full_pace.per_s or self._pace.per_s
        if not per_s:
            return 1.0
        num_waiting = sum(not entry.is_running for entry in self._entries.values())
        return min(_MAX_RETRY_S, (num_waiting / 2 + 1) / per_s)

    def _share(self, caller: str) -> int:
        """Queue places for one caller; callers without a name share all places."""
        most = self._limits.max_queue
        if not caller:
            return most
        share = self._limits.max_queue_per_key
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
        is_full = len(self._entries) - len(waiting) >= self._slots
        return (num_before + is_full) / per_s if num_before or is_full else 0.0


_HALF_LIFE_S = 15.0
_MIN_COUNT = 3
"""Minimum number of events for an estimate of the rate."""


class Throughput:
    """Events per second of busy time, exponentially weighted with a half-life of 15 s.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None  # None while idle
        self._count = 0.0
        self._busy_s = 0.0
        self._num_seen = 0

    def run(self, is_busy: bool) -> None:
        """Set whether there is work from now on."""
        self._advance()
        self._began_s = self._clock() if is_busy else None

    def count(self) -> None:
        """Count one finished event."""
        self._advance()
        self._count += 1
        self._num_seen += 1

    @property
    def per_s(self) -> float | None:
        """Events per second; None until enough events are counted."""
        self._advance()
        if self._num_seen < _MIN_COUNT or self._busy_s <= 0:
            return None
        return self._count / self._busy_s

    def _advance(self) -> None:
        """Advance the busy time to now and decay earlier counts and time."""
        if self._began_s is None:
            return
        now = self._clock()
        passed_s, self._began_s = now - self._began_s, now
        share = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._count *= share
        self._busy_s = self._busy_s * share + passed_s
