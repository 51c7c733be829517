"""Number of draft tokens per step: measured acceptance and step costs, and when a drafter is paused.

Called once per step. Knows no sequences and no drafters, only numbers.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from attrs import define, field, frozen

from enginehouse.contract.drafter import NUM_GRADES

__all__ = [
    "MAX_DRAFT_TOKENS",
    "AcceptanceRates",
    "Candidate",
    "DraftLedger",
    "StepCosts",
    "choose_lengths",
    "expected_tokens",
]

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
"""Numbers of tokens that are told apart; a step belongs to the next larger one."""

_NUM_KEPT = 7  # the median of so many steps forgets a disturbance
_MAX_AGE = 512  # steps after which a size is taken for unknown again: machines get busier and idler
_HOPE = 0.15  # what a further token is thought to cost, as a share of a token's part of the steps that are known


@define(eq=False)
class _Size:
    seconds: deque[float] = field(factory=lambda: deque(maxlen=_NUM_KEPT))
    last_step: int = 0


class StepCosts:
    """Seconds of a step by its number of tokens.

    Between sizes that were seen costs are interpolated. Beyond them they are hoped to be low, so that a size is tried
    when it would pay if that were so; from then on it is known.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []  # sizes with their seconds, both rising
        self._known_at = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so much time."""
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
        """Whether estimates are seconds."""
        return bool(self._look())

    def estimate(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens will take; in arbitrary units before the first step."""
        known = self._look()
        if not known:
            return _hoped(num_tokens)
        below = [pair for pair in known if pair[0] <= num_tokens]
        above = [pair for pair in known if pair[0] > num_tokens]
        if not below:
            size, seconds = known[0]
            return seconds * _hoped(num_tokens) / _hoped(size)
        size, seconds = below[-1]
        if above:
            next_size, next_seconds = above[0]
            share = (num_tokens - size) / (next_size - size)
            return seconds + share * max(0.0, next_seconds - seconds)
        return seconds * (1.0 + _HOPE * (num_tokens - size) / size)

    def _look(self) -> list[tuple[int, float]]:
        """What is known now; looked up once per step, for many lengths are weighed."""
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
    """What a step is thought to cost while nothing of it is known; one token costs 1."""
    return 1.0 + _HOPE * (num_tokens - 1)


def _size_of(num_tokens: int) -> int:
    return _SIZES[bisect_left(_SIZES, num_tokens)]


_MODEL_DECAY = 0.995  # of each grade's record, per token: what was true some hundred tokens ago counts little
_SEQUENCE_DECAY = 0.93
_PRIOR_TOKENS = 6.0  # a drafter's own guess counts like so many tokens
_MODEL_TOKENS = 8.0  # and what is known of the model like so many of the sequence's
_MAX_RATE = 0.995


def _zeros() -> list[float]:
    return [0.0] * NUM_GRADES


@define(eq=False)
class AcceptanceRates:
    """A record of tokens that agreed and did not.

    Attributes:
        prior: the rate of a grade before anything is known of it.
        above: the record that is asked instead of ``prior``; a model's, for that of a sequence.
    """

    prior: float = 0.5
    above: AcceptanceRates | None = None
    _agreed: list[float] = field(factory=_zeros)
    _tried: list[float] = field(factory=_zeros)

    def observe(self, grade: int, num_agreed: int, has_failed: bool) -> None:
        """Tokens of a draft of that grade agreed, and then one did not, unless they were the last."""
        decay = _SEQUENCE_DECAY if self.above is not None else _MODEL_DECAY
        num_tried = num_agreed + has_failed
        kept = decay**num_tried
        self._agreed[grade] = kept * self._agreed[grade] + num_agreed
        self._tried[grade] = kept * self._tried[grade] + num_tried
        if self.above is not None:
            self.above.observe(grade, num_agreed, has_failed)

    def rate(self, grade: int) -> float:
        """Probability that one more token of a draft of that grade agrees; below 1."""
        before, weight = (self.prior, _PRIOR_TOKENS) if self.above is None else (self.above.rate(grade), _MODEL_TOKENS)
        return min(_MAX_RATE, (self._agreed[grade] + weight * before) / (self._tried[grade] + weight))


def expected_tokens(rate: float, num_drafted: int) -> float:
    """Tokens that one forward pass gives on average: the drafted ones up to the first that fails, and one more.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
    """
    return float((1.0 - rate ** (num_drafted + 1)) / (1.0 - rate))


_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_DRAFT_TOKENS = _LENGTHS[-1]
"""Longest draft that is computed at once."""

_MIN_GAIN = 1.1  # estimates err, and a step without drafts is sure to be of use
_MIN_RATE = 0.1  # below it even a token that costs nothing would gain less


@frozen
class Candidate:
    """A sequence that has a draft.

    Attributes:
        rate: probability that each of its tokens agrees.
        num_tokens: length of the draft.
        seconds_per_token: what proposing one token costs.
    """

    rate: float
    num_tokens: int
    seconds_per_token: float = 0.0


def choose_lengths(candidates: Sequence[Candidate], num_others: int, room: int, costs: StepCosts) -> list[int]:
    """How many tokens of each candidate's draft to compute.

    Args:
        candidates: sequences with drafts.
        num_others: sequences without, that give one token each.
        room: most drafted tokens in all.
        costs: what a step costs.
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
    """The lengths that are tried; the whole draft is one of them."""
    lengths = [length for length in _LENGTHS if length < limit]
    return [*lengths, limit] if limit > 0 else []


_START_STEPS = 4.0
_MOST_STEPS = 16.0  # what went well long ago pays for no more than this
_LEAST_STEPS = -64.0
_EARNED_PER_STEP = 0.02  # the share of the time that drafts which do not pay may cost
_MAX_SLOWER = 2.0  # a step that took longer than so many times its estimate was disturbed by something else


@define(eq=False)
class DraftLedger:
    """The account of one drafter. Its unit is the time of a decode step without drafts.

    Attributes:
        balance: steps that it may still lose.
    """

    balance: float = _START_STEPS

    @property
    def is_open(self) -> bool:
        """Whether its drafts may be computed."""
        return self.balance > 0.0

    def add_plain(self) -> None:
        """A decode step without drafts of it."""
        self._add(_EARNED_PER_STEP)

    def add_drafted(self, saved_steps: float, share: float, seconds: float, usual_s: float, plain_s: float) -> None:
        """A step with drafts of it.

        Args:
            saved_steps: steps that its accepted tokens would have taken: tokens over running sequences.
            share: of all drafted tokens of the step, that are its own.
            seconds: that the step took.
            usual_s: that a step of so many tokens usually takes.
            plain_s: that the step would have taken without drafts.
        """
        lasted_s = min(seconds, _MAX_SLOWER * usual_s)
        self._add(saved_steps - share * (lasted_s - plain_s) / plain_s)

    def add_proposing(self, seconds: float, plain_s: float) -> None:
        """Proposing took so long."""
        self._add(-seconds / plain_s)

    def _add(self, steps: float) -> None:
        self.balance = min(_MOST_STEPS, max(_LEAST_STEPS, self.balance + steps))
