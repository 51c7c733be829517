"""How many drafted tokens each sequence of a step gets, none included: what gives most tokens per second.

All sequences of a step wait for each other, so the question is asked for the batch: tokens that the step is expected to
give, over the seconds that a step of so many tokens takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from enginehouse.engine.acceptance import expected_tokens
from enginehouse.engine.step_costs import StepCosts

__all__ = ["MAX_DRAFT_TOKENS", "Candidate", "choose_lengths"]

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
