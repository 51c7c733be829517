"""State of a row's search between two kernels: eight float64 numbers in its record.

The keys ``low`` and ``high`` that bound the end, mass and number of the tokens from each of them upwards, the search
target, and the number of tokens inside. ``kind`` is 0 for the ``top_k`` most probable tokens, 1 for the smallest set
with mass ``top_p``, 2 for the draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["note", "noted", "reaches"]


@triton.jit
def reaches(mass, count, target, kind):
    """True if the tokens above a cut suffice."""
    return tl.where(kind == 0, count >= target, tl.where(kind == 1, mass >= target, mass > target))


@triton.jit
def noted(bracket):
    """Read a bracket written by :func:`note`."""
    return (
        tl.load(bracket).to(tl.int64), tl.load(bracket + 1).to(tl.int64), tl.load(bracket + 2), tl.load(bracket + 3),
        tl.load(bracket + 4), tl.load(bracket + 5), tl.load(bracket + 6), tl.load(bracket + 7).to(tl.int32),
    )  # fmt: skip


@triton.jit
def note(bracket, low, high, mass_low, mass_high, count_low, count_high, target, size):
    """Write a bracket."""
    tl.store(bracket, low.to(tl.float64))
    tl.store(bracket + 1, high.to(tl.float64))
    tl.store(bracket + 2, mass_low)
    tl.store(bracket + 3, mass_high)
    tl.store(bracket + 4, count_low)
    tl.store(bracket + 5, count_high)
    tl.store(bracket + 6, target)
    tl.store(bracket + 7, target * 0.0 + size)
