"""Sampling primitives: rows of logits, log-probabilities, truncation, and the draw.

Called by the sampler. The random numbers are stateless: a draw is a function of (seed, choice, position), so a token
can be sampled again after a preemption, in another worker or in another batch, with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import HIGHEST_TEMPERATURE, LOWEST_LOGPROB, LOWEST_TEMPERATURE

_TOP_K_DEPTHS = (6.0, 12.0, 24.0, np.inf)  # in logits
_MASS_DEPTHS = (3.0, 6.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 26.0, 40.0, np.inf)  # in logits after temperature
_UNDECIDED = 2e-6  # relative error bound of float32 exponentials
_SMALL = 1024  # up to this many tokens are sorted, not narrowed further


@frozen(eq=False)
class Head:
    """The most probable tokens of a row, or the tokens left by truncation, in order.

    Attributes:
        token_ids: (num_candidates,) int64.
        weights: (num_candidates,) float64, ``exp((logit - max) / temperature)``.
        drawn_by: (num_candidates,) float64, the weights of the draw if these are others; else None.
    """

    token_ids: NDArray[np.int64]
    weights: NDArray[np.float64]
    drawn_by: NDArray[np.float64] | None = None

    def __getitem__(self, kept: slice | NDArray[np.bool_]) -> Head:
        return Head(self.token_ids[kept], self.weights[kept])

    def __len__(self) -> int:
        return self.token_ids.size


class LogitRow:
    """One row of logits at one temperature. Tokens with a logit of -inf are never returned.

    Args:
        logits: (vocab_size,) float32 without NaN or +inf, at least one finite; not changed.
        maximum: its largest value; after truncation, the largest of the remaining tokens.
        temperature: greater than 0.
    """

    def __init__(self, logits: NDArray[np.float32], maximum: float, temperature: float = 1.0) -> None:
        self.logits = logits
        self.maximum = maximum
        self.temperature = temperature

    @cached_property
    def fast_weights(self) -> NDArray[np.float32]:
        """(vocab_size,) float32, ``exp((logit - max) / temperature)`` of the whole row."""
        weights = np.subtract(self.logits, np.float32(self.maximum))
        if self.temperature != 1.0:
            np.divide(weights, np.float32(self.temperature), out=weights)
        return np.exp(weights, out=weights)

    @cached_property
    def total(self) -> float:
        """The sum of :attr:`fast_weights`, with a relative error of about 1e-7 (numpy sums pairwise)."""
        return float(self.fast_weights.sum())

    def top(self, count: int) -> Head:
        """Return the ``count`` most probable tokens, or all if there are fewer."""
        for depth in _TOP_K_DEPTHS:
            token_ids = self._within(depth)
            if token_ids.size >= count:
                break
        return self._head(token_ids, count)

    def nucleus(self, mass: float) -> Head:
        """Return the smallest set of most probable tokens whose probability reaches ``mass``, in [0, 1] (top-p)."""
        wanted = mass * self.total
        head = self._head(self._holding(wanted * (1 + _UNDECIDED)))
        sums = np.cumsum(head.weights)
        last = int(np.searchsorted(sums, wanted))
        if (np.abs(sums[max(last - 1, 0) : last + 1] - wanted) <= _UNDECIDED * wanted).any():
            last = int(np.searchsorted(sums, mass * float(self._weights(self.logits).sum())))
        return head[: last + 1]

    def at_least(self, ratio: float) -> Head:
        """Return the tokens with at least ``ratio`` of the most probable token's probability (min-p)."""
        depth = -self.temperature * float(np.log(ratio)) * (1 + 1e-6) + abs(self.maximum) * 1e-6
        return bounded_by_ratio(self._head(self._within(depth)), ratio)

    def whole(self) -> Head:
        """Return all tokens, sorted."""
        return self._head(self._within(np.inf))

    def head_of(self, token_ids: NDArray[np.int64]) -> Head:
        """Return the given tokens, sorted."""
        return self._head(token_ids)

    def at(self, temperature: float, head: Head | None = None) -> tuple[LogitRow, Head | None]:
        """Return this row and ``head``, its remaining tokens, at another temperature.

        Weights are relative to the best remaining token: relative to the best token of the row they would underflow at
        low temperatures.
        """
        if head is None:
            return LogitRow(self.logits, self.maximum, temperature), None
        row = LogitRow(self.logits, float(self.logits[head.token_ids[0]]), temperature)
        return row, Head(head.token_ids, row._weights(self.logits[head.token_ids]))

    def draw(self, number: float) -> int:
        """Return the token at which the cumulative probability, most probable first, exceeds ``number`` in [0, 1)."""
        wanted = number * self.total
        token_ids, left = self._narrow(self._holding(wanted), wanted)
        token_ids = self._sorted(token_ids)
        sums = np.cumsum(self.fast_weights[token_ids], dtype=np.float64)
        index = int(np.searchsorted(sums, left, side="right"))
        if index == sums.size:  # rounding: the weights sum to slightly less than the total
            index = int(np.searchsorted(sums, sums[-1], side="left"))
        return int(token_ids[index])

    def _narrow(self, token_ids: NDArray[np.int64], left: float) -> tuple[NDArray[np.int64], float]:
        """Bisect the logit range until few or only equal tokens remain in which the sum exceeds ``left``.

        Returns:
            Their ids, ascending, and ``left`` minus the weights of all tokens before them.
        """
        while token_ids.size > _SMALL:
            logits = self.logits[token_ids]
            low, high = float(logits.min()), float(logits.max())
            upper = logits > np.float32((low + high) / 2)
            if low == high or not upper.any():
                break
            upper_ids = token_ids[upper]
            mass = float(self.fast_weights[upper_ids].sum(dtype=np.float64))
            if left < mass:
                token_ids = upper_ids
            else:
                left -= mass
                token_ids = token_ids[~upper]
        return token_ids, left

    def _holding(self, wanted: float) -> NDArray[np.int64]:
        """Return ids of the most probable tokens whose weights sum to ``wanted`` (all tokens, if none do)."""
        above, mass = np.float32(np.inf), 0.0
        for depth in _MASS_DEPTHS:
            below = np.float32(self.maximum - depth * self.temperature)
            is_near = self.logits >= below
            if above < np.inf:
                is_near &= self.logits < above
            band = np.flatnonzero(is_near)
            mass += float(self.fast_weights[band].sum(dtype=np.float64))
            if mass >= wanted:
                break
            above = below
        return self._within(depth * self.temperature)

    def _within(self, depth: float) -> NDArray[np.int64]:
        """Return the ids, ascending, of the tokens whose logit is at most ``depth`` below the maximum."""
        floor = np.float32(self.maximum - depth)
        return np.flatnonzero(self.logits >= floor if floor > -np.inf else self.logits > -np.inf)

    def _head(self, token_ids: NDArray[np.int64], count: int | None = None) -> Head:
        token_ids = self._sorted(token_ids, count)
        return Head(token_ids, self._weights(self.logits[token_ids]))

    def _weights(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = (logits.astype(np.float64) - self.maximum) / self.temperature
        return np.exp(scaled, out=scaled)

    def _sorted(self, token_ids: NDArray[np.int64], count: int | None = None) -> NDArray[np.int64]:
        """Sort ``token_ids`` by logit descending, then id; return only the first ``count``.

        Both keys are packed into one integer: the bits of a float32, with those of a negative one inverted, sort like
        its value. Adding 0.0 makes -0.0 and 0.0 equal.
        """
        bits = (self.logits[token_ids] + np.float32(0)).view(np.int32)
        bits ^= (bits >> 31) & np.int32(0x7FFFFFFF)
        keys = np.invert(bits, out=bits).astype(np.int64)
        keys <<= 32
        keys |= token_ids
        if count is not None and keys.size > 4 * count:
            keys = np.partition(keys, count - 1)[:count]
        keys.sort()
        return keys[:count] & 0xFFFFFFFF


def bounded_by_mass(head: Head, mass: float) -> Head:
    """Top-p over the remaining tokens: the first tokens of ``head`` with ``mass`` of its weight, at least one."""
    sums = np.cumsum(head.weights)
    return head[: int(np.searchsorted(sums, mass * sums[-1])) + 1]


def bounded_by_ratio(head: Head, ratio: float) -> Head:
    """Min-p over the remaining tokens: tokens with at least ``ratio`` of the first one's weight."""
    return head[head.weights >= ratio * head.weights[0]]


@frozen(eq=False)
class RawLogprobs:
    """The log-softmax of one raw row: the best tokens precomputed, any other token from its logit.

    Attributes:
        top_ids: (num_top,) int64, best first.
        top_logprobs: (num_top,) float64.
        normaliser: log of the sum of exponentials of the row.
    """

    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    normaliser: float

    @classmethod
    def of(cls, row: LogitRow, num_top: int) -> RawLogprobs:
        """Compute from ``row``, which must be at temperature 1."""
        assert row.temperature == 1.0
        normaliser = row.maximum + float(np.log(row.total))
        top_ids = row.top(num_top).token_ids if num_top else np.empty(0, np.int64)
        top_logprobs = np.minimum(row.logits[top_ids].astype(np.float64) - normaliser, 0.0)
        return cls(top_ids, top_logprobs, normaliser)

    def logprob(self, logit: float) -> float:
        """Return the log-probability of a token with this raw logit, at most 0 and never -inf."""
        return min(max(logit - self.normaliser, LOWEST_LOGPROB), 0.0)


_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64 bits; flipping an input bit flips half of the output bits.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), with the constants of
    Vigna's public-domain version (https://prng.di.unimi.it/splitmix64.c).
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=256)
def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little") if purpose else 0


def uniform(seed: int, choice: int, position: int, purpose: str = "") -> float:
    """Return a number in [0, 1) with 53 random bits that depends on the arguments only.

    Each argument is mixed in by one splitmix64 step, so equal sums of arguments do not collide.

    Args:
        seed: any integer; only its low 64 bits are used.
        choice: 0-based index of the choice.
        position: position of the token in its sequence.
        purpose: distinguishes several numbers of one position; "" is the draw of the token.
    """
    state = _mix((seed + _GAMMA) & _MASK)
    for part in (choice, position, _purpose_key(purpose)):
        state = _mix((state + _GAMMA * (part + 1)) & _MASK)
    return (state >> 11) * 2.0**-53


def pick(weights: NDArray[np.float64], number: float) -> int:
    """Return an index drawn with probability proportional to ``weights``, by inverting their cumulative sum.

    Args:
        weights: (num_candidates,) float64, not negative, at least one positive.
        number: in [0, 1).
    """
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    if index == sums.size:  # the product was rounded up to the whole sum
        index = int(np.searchsorted(sums, sums[-1], side="left"))
    return index


Uniform = Callable[[str], float]
"""``number(purpose)`` returns a reproducible number in [0, 1)."""


class Step(Protocol):
    """One sampling step of one sequence."""

    @property
    def name(self) -> str:
        """Name of the step in the request field ``samplers``."""
        ...

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """Return the row, changed or not, and its remaining tokens; a head of None means all tokens of the row."""
        ...


@frozen
class TopK:
    """Keeps the ``count`` most probable tokens."""

    count: int
    name: str = "top_k"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.top(self.count) if head is None else head[: self.count]


@frozen
class TopP:
    """Keeps the smallest set of most probable tokens with ``mass`` of the remaining probability."""

    mass: float
    name: str = "top_p"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.nucleus(self.mass) if head is None else bounded_by_mass(head, self.mass)


@frozen
class MinP:
    """Keeps tokens with at least ``ratio`` of the most probable remaining token's probability."""

    ratio: float
    name: str = "min_p"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`."""
        return row, row.at_least(self.ratio) if head is None else bounded_by_ratio(head, self.ratio)


@frozen
class Temperature:
    """Divides logits by ``value``, which is greater than 0."""

    value: float
    name: str = "temperature"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """See :class:`Step`."""
        return row.at(self.value, head)


def bounded_temperature(value: float) -> float:
    """Clamp ``value`` to the range of float32 division; values near zero are almost greedy."""
    return min(max(value, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE)
