"""Reports of the engine's statistics from a worker to the server, about once a second and before it becomes idle.

The server therefore always knows them without asking, and a step costs one read of the clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import msgspec

from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginFailures
from enginehouse.workers.messages import MetricsReport

__all__ = ["MetricsReports", "rss_bytes"]

_INTERVAL_S = 1.0


class MetricsReports:
    """Sends the statistics of one engine. Used on the engine thread.

    Args:
        is_process: True if the worker is a process, and so has its own memory.
        failures: the failures of plugins in the worker.
    """

    def __init__(
        self,
        engine: StepEngine,
        send: Callable[[MetricsReport], None],
        *,
        is_process: bool,
        failures: PluginFailures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._send = send
        self._is_process = is_process
        self._failures = failures if failures is not None else PluginFailures()
        self._clock = clock
        self._sent_s = float("-inf")
        self._is_news = True  # the first report contains the size of the cache

    def after_step(self) -> None:
        """A step has ended."""
        self._is_news = True
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def before_rest(self) -> None:
        """The engine is about to become idle."""
        if self._is_news:
            self._report()

    def _report(self) -> None:
        self._sent_s, self._is_news = self._clock(), False
        figures = self._engine.figures()
        if counts := self._failures.counts:
            figures = msgspec.structs.replace(figures, plugin_failures=dict(counts))
        if self._is_process:
            figures = msgspec.structs.replace(figures, rss_bytes=rss_bytes())
        self._send(MetricsReport(figures))


def rss_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it cheaply."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
