"""Health of a worker: hung threads, loads without progress, and descriptions of exit statuses.

Called by :mod:`enginehouse.workers.client`. Detecting a hang needs no cooperation of the worker.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from enginehouse.contract.backend import Progress

__all__ = ["Ending", "LoadWatch", "Watchdog", "count_memory_kills", "describe_exit", "ending_of"]

_COUNTS = Path("/proc/vmstat")


@frozen
class Ending:
    """The end of a worker.

    Attributes:
        text: description of what happened.
        is_from_outside: True if it was killed neither by this server nor by a system that was out of memory.
    """

    text: str
    is_from_outside: bool = False


def ending_of(returncode: int, num_memory_kills: int | None, *, is_own: bool) -> Ending:
    """Return the end of a process.

    Args:
        returncode: as ``subprocess`` gives it; a negative value is a signal.
        num_memory_kills: number of processes that the system has killed because it was out of memory since this one was
            started; None if unknown.
        is_own: True if this server killed it.
    """
    is_from_outside = returncode == -signal.SIGKILL and num_memory_kills == 0 and not is_own
    return Ending(describe_exit(returncode, num_memory_kills), is_from_outside)


def describe_exit(returncode: int, num_memory_kills: int | None = None) -> str:
    """Describe as text how a process ended; the arguments are those of :func:`ending_of`."""
    if returncode >= 0:
        return f"the worker process exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ""
    if name == "SIGKILL":
        by_someone = " (killed by someone; the system was not out of memory)"
        hint = by_someone if num_memory_kills == 0 else " (out of memory, or killed by someone)"
    return f"the worker process was ended by {name}{hint}"


def count_memory_kills() -> int | None:
    """Return the number of out-of-memory kills since the system started, containers included; None if unknown."""
    try:
        for line in _COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):  # not Linux
        pass
    return None


# Checks per limit. The limit counts checks, not seconds: a server that was suspended or busy for long checks only once
# when it continues, and then reads what the worker has sent in the meantime.
_LOOKS = 4


class Watchdog:
    """Watches one thread of a worker. Used on the event loop; no cost while there is no work.

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

    def end(self) -> None:
        """The load has ended; later reports are dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._silent_s += self._interval_s
        if self._limit_s and self._silent_s >= self._limit_s:
            self._timer = None
            news = f"the last news was {self._text!r} at {self._share:.0%}" if self._text else "it never said anything"
            self._on_stuck(f"loading did not get on for {self._limit_s:g} s; {news}")
            return
        if self._silent_s >= _SHOWN_S:
            self._on_progress(self._share, f"{self._text or 'loading'} (no news for {self._silent_s:.0f} s)")
        self._timer = self._loop.call_later(self._interval_s, self._look)
