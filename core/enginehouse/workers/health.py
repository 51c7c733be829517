"""Watchdogs of a worker: hung threads, and loads without progress.

Called by :mod:`enginehouse.workers.client`. Detecting a hang needs no cooperation of the worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from enginehouse.contract.backend import Progress
from enginehouse.contract.inspection import EngineMetrics
from enginehouse.plugins.call_notes import NotedCall

# Checks per limit. The limit counts checks, not seconds: a server that was suspended or busy for long checks only once
# when it continues, and then reads what the worker has sent in the meantime.
_LOOKS = 4


class Watchdog:
    """Watches one thread of a worker. Used on the event loop; no cost without work.

    Args:
        limit_s: maximum time for an answer; 0 disables the watchdog.
        has_work: returns True if the thread should be working.
        ask: sends the ping.
        on_hang: called once, when the thread hangs.
    """

    def __init__(
        self, limit_s: float, has_work: Callable[[], bool], ask: Callable[[], None], on_hang: Callable[[], None]
    ) -> None:
        self._interval_s = limit_s / _LOOKS
        self._has_work = has_work
        self._ask = ask
        self._on_hang = on_hang
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_alive = False
        self._was_at_rest = False  # at the last check
        self._num_looks = 0  # since the unanswered ping

    def begin(self) -> None:
        """There is work now; a repeated call has no effect."""
        self._was_at_rest = False
        if self._timer is None and self._interval_s > 0:
            self._is_alive = True
            self._num_looks = 0
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def heard(self) -> None:
        """The thread has sent a message."""
        self._is_alive = True

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        is_at_rest = not self._has_work()
        if self._is_alive and is_at_rest and self._was_at_rest:
            return  # it has sent a message since the work ended
        self._was_at_rest = is_at_rest
        if self._is_alive:
            self._is_alive, self._num_looks = False, 0
        elif self._num_looks == 0:
            self._num_looks = 1
            self._ask()
        elif self._num_looks > _LOOKS:
            self._on_hang()
            return
        else:
            self._num_looks += 1
        self._timer = self._loop.call_later(self._interval_s, self._look)


# Checks per limit. The limit counts checks, not seconds, for the same reason as ``_LOOKS``.
_LOAD_LOOKS = 6

_SHOWN_S = 10.0


class LoadWatch:
    """Watches one load. Used on the event loop, from its creation to :meth:`end`.

    Args:
        limit_s: seconds without progress after which the load is stuck; 0 disables the limit.
        on_progress: called with the reported progress, and with the time without any.
        on_stuck: called once, with a description of the problem.
    """

    def __init__(self, limit_s: float, on_progress: Progress, on_stuck: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._interval_s = min(_SHOWN_S, limit_s / _LOAD_LOOKS) if limit_s else _SHOWN_S
        self._on_progress = on_progress
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._share, self._text = 0.0, ""
        self._silent_s = 0.0
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._interval_s, self._look)

    def heard(self, share: float, text: str) -> None:
        """The load has made progress."""
        if self._timer is not None:
            self._share, self._text, self._silent_s = share, text, 0.0
            self._on_progress(share, text)

    def explain(self, reason: str) -> str:
        """Return the reason for the end of a worker with what it reported last, if it was still loading."""
        is_loading = self._timer is not None and self._text
        return f"{reason}; its last report was {self._text!r}" if is_loading else reason

    def end(self) -> None:
        """The load has ended; later reports are dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._silent_s += self._interval_s
        if self._limit_s and self._silent_s >= self._limit_s:
            self._timer = None
            news = f"the last report was {self._text!r} at {self._share:.0%}" if self._text else "there was no report"
            self._on_stuck(f"loading made no progress for {self._limit_s:g} s; {news}")
            return
        if self._silent_s >= _SHOWN_S:
            self._on_progress(self._share, f"{self._text or 'loading'} (no progress for {self._silent_s:.0f} s)")
        self._timer = self._loop.call_later(self._interval_s, self._look)


def with_failures(metrics: EngineMetrics, noted: Sequence[NotedCall]) -> EngineMetrics:
    """Return statistics that count the calls that the worker did not survive, which it could not count itself."""
    counts = Counter(metrics.plugin_failures)
    counts.update((call.plugin, call.kind) for call in noted)
    return replace(metrics, plugin_failures=dict(counts))


def lost_request(reason: str) -> str:
    """Return the error message for a request that was lost with its worker."""
    return f"The model stopped working ({reason}); it is being restarted, so try again in a moment."
