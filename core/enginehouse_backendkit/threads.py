"""Chooses the number of threads for a batch from the measured times of previous ones.

The threads of a step wait for each other hundreds of times, so one thread that has lost its core to another program
delays all. The fastest count changes from second to second on a shared machine, and differs between one token and
eight. Each class of small batches therefore measures: it keeps a count while it performs well, tries the next lower one
immediately when steps become slow, and tries its neighbours occasionally with a small share of its time. A trial
alternates with the count in use, so that a temporary disturbance affects both.

Batches of more than ``max_tokens`` always get all threads.

Pure logic: does not know libraries or the machine; the clock is an argument.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from attrs import define, field

__all__ = ["MAX_ADAPTED_TOKENS", "ThreadChooser", "thread_counts"]

MAX_ADAPTED_TOKENS = 16
"""Larger batches of generating models lost nothing by all threads, in measurements beside a busy process."""

_PROBE_SHARE = 0.005
"""Maximum share of time spent on trying other counts."""

_MIN_PROBE_PAUSE_S = 1.0
_MAX_PROBE_PAUSE_S = 60.0
_MIN_ALARM_PAUSE_S = 0.5
_BETTER = 0.92
"""A tried count is adopted if it takes less than this share of the usual time."""

_CLEARLY_FASTER, _CLEARLY_SLOWER = 0.5, 1.3
"""A tried step that takes less or more than these multiples of the usual time ends the trial; rejecting needs less."""

_TRIAL_STEPS = 3
_RECENT_STEPS = 5

_SLOW = 1.5
"""A step is slow if it takes more than this multiple of the usual time; two in a row raise an alarm."""

_USUAL_WEIGHT = 0.1


def thread_counts(max_threads: int) -> tuple[int, ...]:
    """Counts to try, descending: all, all but one (for one busy neighbour), then halves."""
    counts = {max_threads, max(max_threads - 1, 1)}
    half = max_threads // 2
    while half:
        counts.add(half)
        half //= 2
    return tuple(sorted(counts, reverse=True))


class ThreadChooser:
    """Chooses thread counts; used by one thread: :meth:`choose` before a batch, :meth:`record` after it.

    Args:
        counts: thread counts, descending; a single one is never changed.
        clock: monotonic seconds.
        max_tokens: batches of more tokens get all threads.
    """

    def __init__(
        self, counts: Sequence[int], clock: Callable[[], float] = time.monotonic, max_tokens: int = MAX_ADAPTED_TOKENS
    ) -> None:
        self._counts = tuple(counts)
        self._max_tokens = max_tokens
        self._clock = clock
        self._classes: dict[int, _SizeClass] = {}

    @property
    def max_threads(self) -> int:
        """The highest count."""
        return self._counts[0]

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a batch of ``num_tokens``."""
        if not self._adapts(num_tokens):
            return self._counts[0]
        return self._counts[self._class_of(num_tokens).next_index(self._clock())]

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        """Record the time of a batch that ran with the count from :meth:`choose`."""
        if self._adapts(num_tokens):
            self._class_of(num_tokens).record(self._counts.index(threads), seconds / num_tokens, seconds, self._clock())

    def _adapts(self, num_tokens: int) -> bool:
        return len(self._counts) > 1 and num_tokens <= self._max_tokens

    def _class_of(self, num_tokens: int) -> _SizeClass:
        """Return the size class; sizes 1, 2, 3-4, 5-8, ... are measured separately, in seconds per token."""
        key = (num_tokens - 1).bit_length()
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _SizeClass(len(self._counts), self._clock() + _MIN_PROBE_PAUSE_S)
        return found


@define
class _Trial:
    """A count that alternates with the one in use.

    Attributes:
        index: index of the tried count.
        tried: its times so far.
        usual: times of the count in use since the trial began.
        lost_s: cost of the trial in seconds.
        is_turn: the next step uses the tried count.
    """

    index: int
    tried: list[float] = field(factory=list)
    usual: list[float] = field(factory=list)
    lost_s: float = 0.0
    is_turn: bool = True


@define
class _SizeClass:
    """Measurements of one class of batch sizes. Counts are given by index; times are per token.

    Attributes:
        probe_at: earliest time of the next trial of a neighbour.
        alarm_at: earliest time of the next alarm.
        index: the count in use.
        usual: moving average time of the count in use; None before the first measurement.
        recent: last times of the count in use.
        num_slow: slow steps in a row.
        trial: the current trial.
        looks_up: the next neighbour to try is the higher one.
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
        """Index of the count for the next step."""
        if self.trial is None and self.usual is not None and now >= self.probe_at:
            self.trial = _Trial(self._neighbour())
        return self.index if self.trial is None or not self.trial.is_turn else self.trial.index

    def record(self, index: int, time_per_token: float, seconds: float, now: float) -> None:
        """Record a measurement of the count that :meth:`next_index` returned."""
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
        """End the trial once it is clear which count is faster; delay the next one after a costly failure."""
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
        """Track the count in use, and try the lower one when it becomes slow."""
        self.recent.append(time_per_token)
        if self.usual is None:
            self.usual = time_per_token
            return
        self.num_slow = self.num_slow + 1 if time_per_token > _SLOW * self.usual else 0
        self.usual += _USUAL_WEIGHT * (time_per_token - self.usual)
        if self.num_slow >= 2 and now >= self.alarm_at and self.index + 1 < self.num_counts:
            self.recent.clear()
            self.recent.append(time_per_token)  # the time that the trial has to beat
            self.trial = _Trial(self.index + 1)
            self.alarm_at = now + _MIN_ALARM_PAUSE_S

    def _neighbour(self) -> int:
        """Return the next higher or lower count, alternating."""
        self.looks_up = not self.looks_up
        if (self.looks_up and self.index > 0) or self.index + 1 == self.num_counts:
            return self.index - 1
        return self.index + 1
