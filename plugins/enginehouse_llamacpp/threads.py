"""Chooses how many threads compute a batch, from how long the last ones took.

A step's threads wait for each other hundreds of times, so one thread that has lost its core to another program holds
up all. Which count is fastest changes from second to second on a shared machine, and differs between one token and
many. So each class of batch sizes measures: it stays with a count while that serves it, tries the next lower one at
once when steps become slow, and tries its neighbours now and then with a small share of its time.

Pure: knows neither llama.cpp nor the machine; the clock is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import define, field

__all__ = ["ThreadChooser", "thread_counts"]

_PROBE_SHARE = 0.005
"""Share of the time that trying other counts may cost."""

_MIN_PROBE_PAUSE_S = 1.0
_MAX_PROBE_PAUSE_S = 60.0
_MIN_ALARM_PAUSE_S = 0.5
_BETTER = 0.92
"""A tried count must take less than this share of the usual time to be taken."""

_SLOW = 1.5
"""A step is slow when it takes more than this many times the usual time; two in a row are an alarm."""

_USUAL_WEIGHT = 0.1
_RECENT_WEIGHT = 0.4


def thread_counts(max_threads: int) -> tuple[int, ...]:
    """Counts worth trying, descending: all, all but one (for one busy neighbour), then halves."""
    counts = {max_threads, max(max_threads - 1, 1)}
    half = max_threads // 2
    while half:
        counts.add(half)
        half //= 2
    return tuple(sorted(counts, reverse=True))


class ThreadChooser:
    """Used by one thread: :meth:`choose` before a batch, :meth:`record` after it.

    Args:
        counts: thread counts, descending; a single one is never changed.
        clock: seconds that only grow.
    """

    def __init__(self, counts: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = tuple(counts)
        self._clock = clock
        self._classes: dict[int, _SizeClass] = {}

    @property
    def max_threads(self) -> int:
        """The highest count."""
        return self._counts[0]

    def choose(self, num_tokens: int) -> int:
        """Threads for a batch of ``num_tokens``."""
        if len(self._counts) == 1:
            return self._counts[0]
        return self._counts[self._class_of(num_tokens).next_index(self._clock())]

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        """How long a batch took with what :meth:`choose` said."""
        if len(self._counts) > 1:
            self._class_of(num_tokens).record(self._counts.index(threads), seconds / num_tokens, seconds, self._clock())

    def _class_of(self, num_tokens: int) -> _SizeClass:
        """Sizes 1, 2, 3-4, 5-8, ... are measured apart, in seconds per token."""
        key = (num_tokens - 1).bit_length()
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _SizeClass(len(self._counts), self._clock() + _MIN_PROBE_PAUSE_S)
        return found


@define
class _SizeClass:
    """What is known about one class of batch sizes. Counts are meant by their index; times are per token.

    Attributes:
        probe_at: when the next neighbour may be tried.
        index: the count in use.
        usual: slowly moving time of the count in use; None before it was measured.
        recent: quickly moving time of the count in use.
        num_slow: slow steps in a row.
        trial: the count to try in the next step.
        looks_up: whether the next neighbour to try is the higher one.
    """

    num_counts: int
    probe_at: float
    alarm_at: float = 0.0
    index: int = 0
    usual: float | None = None
    recent: float = 0.0
    num_slow: int = 0
    trial: int | None = None
    looks_up: bool = field(default=False)

    def next_index(self, now: float) -> int:
        """The count for the next step."""
        if self.trial is None and self.usual is not None and now >= self.probe_at:
            self.trial = self._neighbour()
        return self.index if self.trial is None else self.trial

    def record(self, index: int, time_per_token: float, seconds: float, now: float) -> None:
        """Take a measurement of the count that :meth:`next_index` gave."""
        if self.trial is not None and index == self.trial:
            self._judge(time_per_token, seconds, now)
        elif self.usual is None:
            self.usual = self.recent = time_per_token
        else:
            self._watch(time_per_token, now)

    def _judge(self, time_per_token: float, seconds: float, now: float) -> None:
        """Take over the tried count if it was clearly faster; a costly failure is not repeated soon."""
        tried, self.trial = self.trial, None
        if tried is not None and time_per_token < _BETTER * self.recent:
            self.index = tried
            self.usual = self.recent = time_per_token
            self.num_slow = 0
            self.probe_at = now + _MIN_PROBE_PAUSE_S
            return
        lost_s = seconds * max(1.0 - self.recent / time_per_token, 0.0)
        self.probe_at = now + min(max(_MIN_PROBE_PAUSE_S, lost_s / _PROBE_SHARE), _MAX_PROBE_PAUSE_S)

    def _watch(self, time_per_token: float, now: float) -> None:
        """Follow the count in use, and raise the alarm when it became slow."""
        assert self.usual is not None
        self.num_slow = self.num_slow + 1 if time_per_token > _SLOW * self.usual else 0
        self.usual += _USUAL_WEIGHT * (time_per_token - self.usual)
        self.recent += _RECENT_WEIGHT * (time_per_token - self.recent)
        if self.num_slow >= 2 and now >= self.alarm_at and self.index + 1 < self.num_counts:
            self.trial = self.index + 1
            self.recent = time_per_token  # what the trial has to beat
            self.num_slow = 0
            self.alarm_at = now + _MIN_ALARM_PAUSE_S

    def _neighbour(self) -> int:
        """The next higher or lower count, in turn."""
        self.looks_up = not self.looks_up
        if (self.looks_up and self.index > 0) or self.index + 1 == self.num_counts:
            return self.index - 1
        return self.index + 1
