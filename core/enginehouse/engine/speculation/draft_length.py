"""Number of draft tokens per step: measured acceptance and step costs, and when a drafter is paused.

Called once per step. Works on numbers only; does not know sequences or drafters.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from operator import itemgetter

from attrs import define, field, frozen

from enginehouse.contract.drafter import NUM_GRADES

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
"""Bucket sizes of step costs, in tokens; a step belongs to the next larger size."""

_NUM_KEPT = 7  # the median of this many steps is robust to a disturbance
_MAX_AGE = 512  # steps after which a measured size is unknown again, since machine load changes
_HOPE = 0.15  # assumed cost of a further token, as a share of the cost per token of known steps


@define(eq=False)
class _Size:
    seconds: deque[float] = field(factory=lambda: deque(maxlen=_NUM_KEPT))
    last_step: int = 0


class StepCosts:
    """Seconds per step as a function of its number of tokens.

    Between measured sizes, costs are interpolated. Beyond them they are extrapolated optimistically, so that promising
    sizes are tried and thereby measured.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []  # measured sizes with their seconds, both ascending
        self._known_at = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of ``num_tokens`` tokens."""
        self._num_steps += 1
        if num_tokens > _SIZES[-1] or seconds <= 0.0:
            return
        size = self._sizes.setdefault(_size_of(num_tokens), _Size())
        if self._num_steps - size.last_step > _MAX_AGE:
            size.seconds.clear()
        size.seconds.append(seconds)
        size.last_step = self._num_steps

    @property
    def is_known(self) -> bool:
        """True if estimates are in seconds."""
        return bool(self._look())

    def estimate(self, num_tokens: int) -> float:
        """Return the estimated seconds of a step of ``num_tokens`` tokens; arbitrary units before the first step."""
        known = self._look()
        if not known:
            return _hoped(num_tokens)
        above = bisect_right(known, num_tokens, key=itemgetter(0))
        if not above:
            size, seconds = known[0]
            return seconds * _hoped(num_tokens) / _hoped(size)
        size, seconds = known[above - 1]
        if above < len(known):
            next_size, next_seconds = known[above]
            share = (num_tokens - size) / (next_size - size)
            return seconds + share * max(0.0, next_seconds - seconds)
        return seconds * (1.0 + _HOPE * (num_tokens - size) / size)

    def _look(self) -> list[tuple[int, float]]:
        """Return the current measurements; cached per step, because many lengths are compared."""
        if self._known_at == self._num_steps:
            return self._known
        known: list[tuple[int, float]] = []
        for size in sorted(self._sizes):
            entry = self._sizes[size]
            if self._num_steps - entry.last_step <= _MAX_AGE:
                seconds = statistics.median(entry.seconds)
                known.append((size, max(seconds, known[-1][1]) if known else seconds))
        self._known, self._known_at = known, self._num_steps
        return known


def _hoped(num_tokens: int) -> float:
    """Return the assumed cost of a step before anything is measured; one token costs 1."""
    return 1.0 + _HOPE * (num_tokens - 1)


def _size_of(num_tokens: int) -> int:
    return _SIZES[bisect_left(_SIZES, num_tokens)]


_MODEL_DECAY = 0.995  # of each grade's record, per token: a few hundred tokens later it counts little
_SEQUENCE_DECAY = 0.93
_PRIOR_TOKENS = 6.0  # weight of a drafter's prior, in tokens
_MODEL_TOKENS = 8.0  # weight of the model's record against the sequence's, in tokens
_MAX_RATE = 0.995


def _zeros() -> list[float]:
    return [0.0] * NUM_GRADES


@define(eq=False)
class AcceptanceRates:
    """Counts of accepted and rejected draft tokens, with exponential decay.

    Attributes:
        prior: acceptance rate of a grade before any observation.
        above: the record used instead of ``prior``; for a sequence, that of the model.
    """

    prior: float = 0.5
    above: AcceptanceRates | None = None
    _agreed: list[float] = field(factory=_zeros)
    _tried: list[float] = field(factory=_zeros)

    def observe(self, grade: int, num_agreed: int, has_failed: bool) -> None:
        """Record a draft of ``grade``: ``num_agreed`` accepted tokens, then a rejected one if ``has_failed``."""
        decay = _SEQUENCE_DECAY if self.above is not None else _MODEL_DECAY
        num_tried = num_agreed + has_failed
        kept = decay**num_tried
        self._agreed[grade] = kept * self._agreed[grade] + num_agreed
        self._tried[grade] = kept * self._tried[grade] + num_tried
        if self.above is not None:
            self.above.observe(grade, num_agreed, has_failed)

    def rate(self, grade: int) -> float:
        """Return the probability that one more token of a draft of that grade is accepted; below 1."""
        before, weight = (self.prior, _PRIOR_TOKENS) if self.above is None else (self.above.rate(grade), _MODEL_TOKENS)
        return min(_MAX_RATE, (self._agreed[grade] + weight * before) / (self._tried[grade] + weight))


def expected_tokens(rate: float, num_drafted: int) -> float:
    """Return the expected tokens per forward pass: the drafted ones up to the first rejected, and one more.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
    """
    return float((1.0 - rate ** (num_drafted + 1)) / (1.0 - rate))


_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_DRAFT_TOKENS = _LENGTHS[-1]
"""Maximum length of a draft computed in one step."""

_MIN_GAIN = 1.1  # estimates have errors, and a step without drafts always gains a token
_MIN_RATE = 0.1  # below this rate even a token without cost gains less


@frozen
class Candidate:
    """A sequence that has a draft.

    Attributes:
        rate: probability that each of its tokens is accepted.
        num_tokens: length of the draft.
        seconds_per_token: cost of proposing one token.
    """

    rate: float
    num_tokens: int
    seconds_per_token: float = 0.0


def choose_lengths(candidates: Sequence[Candidate], num_others: int, room: int, costs: StepCosts) -> list[int]:
    """Return the number of tokens of each candidate's draft to compute.

    Args:
        candidates: sequences with drafts.
        num_others: number of sequences without drafts, with one token each.
        room: maximum total of drafted tokens.
        costs: costs of a step.
    """
    num_tokens = num_others + len(candidates)  # of the step, as chosen so far
    expected = float(num_tokens)
    proposing_s = 0.0
    lengths = [0] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda index: -candidates[index].rate):
        candidate = candidates[index]
        if candidate.rate < _MIN_RATE:
            continue
        best = expected / (costs.estimate(num_tokens) + proposing_s) * _MIN_GAIN
        gain = 0.0
        for length in _lengths_up_to(min(candidate.num_tokens, room)):
            more = expected_tokens(candidate.rate, length) - 1.0
            seconds = costs.estimate(num_tokens + length) + proposing_s + length * candidate.seconds_per_token
            if (expected + more) / seconds > best:
                best, gain, lengths[index] = (expected + more) / seconds, more, length
        chosen = lengths[index]
        num_tokens, room, expected = num_tokens + chosen, room - chosen, expected + gain
        proposing_s += chosen * candidate.seconds_per_token
    return lengths


def _lengths_up_to(limit: int) -> list[int]:
    """Return the lengths to compare, including the whole draft."""
    lengths = [length for length in _LENGTHS if length < limit]
    return [*lengths, limit] if limit > 0 else []


_START_STEPS = 4.0
_MOST_STEPS = 16.0  # limit of the credit from earlier gains
_LEAST_STEPS = -64.0
_EARNED_PER_STEP = 0.02  # share of the time that drafts may cost without paying off
_MAX_SLOWER = 2.0  # a step, or a draft, slower than this multiple of its estimate was disturbed


@define(eq=False)
class DrafterBudget:
    """Balance of gains and losses of one drafter, in units of a decode step without drafts.

    Attributes:
        balance: number of steps that it may still lose.
    """

    balance: float = _START_STEPS

    @property
    def is_open(self) -> bool:
        """True if its drafts may be computed."""
        return self.balance > 0.0

    def add_plain(self) -> None:
        """Credit a decode step without drafts of this drafter."""
        self._add(_EARNED_PER_STEP)

    def add_drafted(self, saved_steps: float, share: float, seconds: float, usual_s: float, plain_s: float) -> None:
        """Record a step with drafts of this drafter.

        Args:
            saved_steps: its accepted tokens divided by the running sequences: the plain steps that they replace.
            share: its share of all drafted tokens of the step.
            seconds: duration of the step.
            usual_s: usual duration of a step with this number of tokens.
            plain_s: estimated duration of the step without drafts.
        """
        lasted_s = min(seconds, _MAX_SLOWER * usual_s)
        self._add(saved_steps - share * (lasted_s - plain_s) / plain_s)

    def add_proposing(self, seconds: float, usual_s: float, plain_s: float) -> None:
        """Charge the time spent on proposing; ``usual_s`` is the usual time for as many tokens."""
        self._add(-min(seconds, _MAX_SLOWER * usual_s) / plain_s)

    def _add(self, steps: float) -> None:
        self.balance = min(_MOST_STEPS, max(_LEAST_STEPS, self.balance + steps))
