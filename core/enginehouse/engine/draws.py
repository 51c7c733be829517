"""Random numbers that are functions of where they are used, and the draw of one token.

Called by the sampler. Knows nothing of logits: it turns (seed, choice, position) into a number and a
number into an index. There is no generator with a state, so a token can be drawn again after a
preemption, in another worker or in another batch, and comes out the same.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["pick", "uniform"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64 bits in which each input bit flips half of the output bits.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), with the
    constants of Vigna's public-domain version (https://prng.di.unimi.it/splitmix64.c).
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=256)
def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little") if purpose else 0


def uniform(seed: int, choice: int, position: int, purpose: str = "") -> float:
    """A number in [0, 1) with 53 random bits that depends on the arguments only.

    Each argument is mixed in by one splitmix64 step, so equal sums of arguments do not collide.

    Args:
        seed: any integer; its low 64 bits count.
        choice: 0-based index of the choice.
        position: position of the token in its sequence.
        purpose: tells several numbers of one position apart; "" is the draw of the token.
    """
    state = _mix((seed + _GAMMA) & _MASK)
    for part in (choice, position, _purpose_key(purpose)):
        state = _mix((state + _GAMMA * (part + 1)) & _MASK)
    return (state >> 11) * 2.0**-53


def pick(weights: NDArray[np.float64], number: float) -> int:
    """Index drawn with probability proportional to ``weights``, by the inverse of their running sum.

    Args:
        weights: (num_candidates,) float64, not negative, at least one positive.
        number: in [0, 1).
    """
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    if index == sums.size:  # the product was rounded up to the whole sum
        index = int(np.searchsorted(sums, sums[-1], side="left"))
    return index
