"""When a worker tells the server what its engine has counted: about once a second, and before it rests.

So the server always knows them without asking, and a step costs one look at the clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import msgspec

from enginehouse.engine.loop import StepEngine
from enginehouse.workers.messages import Figures

__all__ = ["FigureReports", "rss_bytes"]

_INTERVAL_S = 1.0


class FigureReports:
    """Sends the figures of one engine. Used on the engine thread.

    Args:
        is_process: whether the worker has a process, and so memory, of its own.
    """

    def __init__(
        self,
        engine: StepEngine,
        send: Callable[[Figures], None],
        *,
        is_process: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._send = send
        self._is_process = is_process
        self._clock = clock
        self._sent_s = float("-inf")
        self._is_news = True  # the first ones tell the size of the cache

    def after_step(self) -> None:
        """A step has ended."""
        self._is_news = True
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def before_rest(self) -> None:
        """Nothing is left to do."""
        if self._is_news:
            self._report()

    def _report(self) -> None:
        self._sent_s, self._is_news = self._clock(), False
        figures = self._engine.figures()
        if self._is_process:
            figures = msgspec.structs.replace(figures, rss_bytes=rss_bytes())
        self._send(Figures(figures))


def rss_bytes() -> int:
    """Memory of this process that is in use now; 0 where the system does not say so cheaply."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
