"""Chooses how many threads compute a batch, from how long the last ones took.

A step's threads wait for each other hundreds of times, so one thread that has lost its core to another program holds
up all. Which count is fastest changes from second to second on a shared machine, and differs between one token and
eight. So each class of small batches measures: it stays with a count while that serves it, tries the next lower one
at once when steps become slow, and tries its neighbours now and then with a small share of its time. A trial takes
turns with the count in use, so that a passing disturbance hits both.

Larger batches always get all threads: measured beside a busy process, they lose nothing by it.

Pure: knows neither llama.cpp nor the machine; the clock is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from attrs import define, field

__all__ = ["ThreadChooser", "thread_counts"]

_MAX_TOKENS = 16
"""Batches of more tokens get all threads."""

_PROBE_SHARE = 0.005
"""Share of the time that trying other counts may cost."""

_MIN_PROBE_PAUSE_S = 1.0
_MAX_PROBE_PAUSE_S = 60.0
_MIN_ALARM_PAUSE_S = 0.5
_BETTER = 0.92
"""A tried count must take less than this share of the usual time to be taken."""

_CLEARLY_FASTER, _CLEARLY_SLOWER = 0.5, 1.3
"""A tried step that takes less or more than these many times the usual one ends the trial: giving up needs less."""

_TRIAL_STEPS = 3
_RECENT_STEPS = 5

_SLOW = 1.5
"""A step is slow when it takes more than this many times the usual time; two in a row are an alarm."""

_USUAL_WEIGHT = 0.1


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
        if not self._adapts(num_tokens):
            return self._counts[0]
        return self._counts[self._class_of(num_tokens).next_index(self._clock())]

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        """How long a batch took with what :meth:`choose` said."""
        if self._adapts(num_tokens):
            self._class_of(num_tokens).record(self._counts.index(threads), seconds / num_tokens, seconds, self._clock())

    def _adapts(self, num_tokens: int) -> bool:
        return len(self._counts) > 1 and num_tokens <= _MAX_TOKENS

    def _class_of(self, num_tokens: int) -> _SizeClass:
        """Sizes 1, 2, 3-4, 5-8, ... are measured apart, in seconds per token."""
        key = (num_tokens - 1).bit_length()
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _SizeClass(len(self._counts), self._clock() + _MIN_PROBE_PAUSE_S)
        return found


@define
class _Trial:
    """A count that takes turns with the one in use.

    Attributes:
        index: the count.
        tried: its times so far.
        usual: times of the count in use since the trial began.
        lost_s: seconds that the trial has cost.
        is_turn: whether the next step belongs to the tried count.
    """

    index: int
    tried: list[float] = field(factory=list)
    usual: list[float] = field(factory=list)
    lost_s: float = 0.0
    is_turn: bool = True


@define
class _SizeClass:
    """What is known about one class of batch sizes. Counts are meant by their index; times are per token.

    Attributes:
        probe_at: when the next neighbour may be tried.
        alarm_at: when the next alarm may be raised.
        index: the count in use.
        usual: slowly moving time of the count in use; None before it was measured.
        recent: last times of the count in use.
        num_slow: slow steps in a row.
        trial: what is being tried.
        looks_up: whether the next neighbour to try is the higher one.
    """

    num_counts: int
    probe_at: float
    alarm_at: float = 0.0
    index: int = 0
    usual: float | None = None
    recent: deque[float] = field(factory=lambda: deque(maxlen=_RECENT_STEPS))
    num_slow: int = 0
    trial: _Trial | None = None
    looks_up: bool = False

    def next_index(self, now: float) -> int:
        """The count for the next step."""
        if self.trial is None and self.usual is not None and now >= self.probe_at:
            self.trial = _Trial(self._neighbour())
        return self.index if self.trial is None or not self.trial.is_turn else self.trial.index

    def record(self, index: int, time_per_token: float, seconds: float, now: float) -> None:
        """Take a measurement of the count that :meth:`next_index` gave."""
        trial = self.trial
        if trial is None:
            self._watch(time_per_token, now)
        elif index == trial.index:
            trial.tried.append(time_per_token)
            trial.lost_s += seconds * max(1.0 - median(self.recent) / time_per_token, 0.0)
            trial.is_turn = False
            self._judge(trial, now)
        else:
            trial.usual.append(time_per_token)
            trial.is_turn = True
            self.recent.append(time_per_token)

    def _judge(self, trial: _Trial, now: float) -> None:
        """End the trial when it is clear which count is faster; a costly failure is not repeated soon."""
        tried, usual = median(trial.tried), median(trial.usual or self.recent)
        is_clear = not _CLEARLY_FASTER < tried / usual < _CLEARLY_SLOWER
        is_over = is_clear or len(trial.tried) == _TRIAL_STEPS
        if not is_over:
            return
        self.trial, self.num_slow = None, 0
        if tried < _BETTER * usual:
            self.index, self.usual = trial.index, tried
            self.recent.clear()
            self.recent.append(tried)
            self.probe_at = now + _MIN_PROBE_PAUSE_S
        else:
            self.probe_at = now + min(max(_MIN_PROBE_PAUSE_S, trial.lost_s / _PROBE_SHARE), _MAX_PROBE_PAUSE_S)

    def _watch(self, time_per_token: float, now: float) -> None:
        """Follow the count in use, and try the lower one when it became slow."""
        self.recent.append(time_per_token)
        if self.usual is None:
            self.usual = time_per_token
            return
        self.num_slow = self.num_slow + 1 if time_per_token > _SLOW * self.usual else 0
        self.usual += _USUAL_WEIGHT * (time_per_token - self.usual)
        if self.num_slow >= 2 and now >= self.alarm_at and self.index + 1 < self.num_counts:
            self.recent.clear()
            self.recent.append(time_per_token)  # what the trial has to beat
            self.trial = _Trial(self.index + 1)
            self.alarm_at = now + _MIN_ALARM_PAUSE_S

    def _neighbour(self) -> int:
        """The next higher or lower count, in turn."""
        self.looks_up = not self.looks_up
        if (self.looks_up and self.index > 0) or self.index + 1 == self.num_counts:
            return self.index - 1
        return self.index + 1
