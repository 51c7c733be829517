"""Notices a load that does not get on: files on a dead network disk, a library that waits for ever.

How long a load may take nobody knows; one that is at work says something new now and then. One that has not for too
long is given up, and whoever looks meanwhile is shown how long there has been no news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from enginehouse.contract.backend import Progress

__all__ = ["LoadWatch"]

# Looks per limit. Counted in looks, not in seconds, for the reason that ``watchdog`` gives.
_LOOKS = 6

_SHOWN_S = 10.0


class LoadWatch:
    """Watches one load. Lives on the event loop, from its creation to :meth:`end`.

    Args:
        limit_s: seconds without news after which it is stuck; 0 is never.
        on_progress: shown what the load says, and how long it has said nothing.
        on_stuck: called once, with what is wrong.
    """

    def __init__(self, limit_s: float, on_progress: Progress, on_stuck: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._interval_s = min(_SHOWN_S, limit_s / _LOOKS) if limit_s else _SHOWN_S
        self._on_progress = on_progress
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._share, self._text = 0.0, ""
        self._silent_s = 0.0
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._interval_s, self._look)

    def heard(self, share: float, text: str) -> None:
        """The load has got on."""
        if self._timer is not None:
            self._share, self._text, self._silent_s = share, text, 0.0
            self._on_progress(share, text)

    def end(self) -> None:
        """The load has ended; later news are dropped."""
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
