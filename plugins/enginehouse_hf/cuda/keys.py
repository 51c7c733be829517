"""Logits as order-preserving integers (keys), and cuts of ranges of them.

Called by the kernels in ``search.py`` and ``search_end.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["even_cuts", "first_cuts", "key_of", "least_key", "three_cuts", "value_of", "weight_of"]


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """Integer with the same order as the float32 ``value``; ``SHIFT`` drops bits that the dtype of the logits lacks."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Float32 value of a key."""
    bits = (key << SHIFT).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(key, highest, inverse, SHIFT: tl.constexpr):
    """Probability of a token with this key, relative to the most probable one."""
    return tl.exp((value_of(key, SHIFT) - highest) * inverse).to(tl.float64)


@triton.jit
def least_key(min_p, highest, temperature, inverse, bottom, SHIFT: tl.constexpr):
    """Smallest key that ``min_p`` allows; ``bottom`` if there is none."""
    key = bottom
    if min_p > 0.0:
        key = key_of(highest + tl.log(min_p.to(tl.float32)) * temperature, SHIFT).to(tl.int64)
        # The key of this floor is rounded down; move one step up if that admits tokens that are too improbable.
        if weight_of(key, highest, inverse, SHIFT) < min_p * (1.0 - 1e-6):
            key += 1
    return tl.maximum(key, bottom)


@triton.jit
def first_cuts(highest, temperature, bottom, top, least, SHIFT: tl.constexpr):
    """The bottom, keys at fixed distances (in temperatures) below the highest logit, and the key of ``min_p``."""
    column = tl.arange(0, 8)
    far = tl.where(column == 3, 5.0, tl.where(column == 4, 3.5, tl.where(column == 5, 2.2, 1.0)))
    far = tl.where(column == 1, 10.0, tl.where(column == 2, 7.0, far))
    cuts = key_of(highest - far * temperature, SHIFT).to(tl.int64)
    cuts = tl.where(column == 0, bottom, tl.where(column == 7, least, cuts))
    return tl.minimum(tl.maximum(cuts, bottom), top - 1)


@triton.jit
def even_cuts(low, high, SHIFT: tl.constexpr):
    """``low``, and seven keys between it and ``high`` with evenly spaced values."""
    column = tl.arange(0, 8)
    bottom = value_of(low, SHIFT)
    step = (value_of(high - 1, SHIFT) - bottom) * 0.125
    cuts = key_of(bottom + step * column.to(tl.float32), SHIFT).to(tl.int64)
    cuts = tl.where(column == 0, low, cuts)
    return tl.minimum(tl.maximum(cuts, low), high - 1)


@triton.jit
def three_cuts(low, high, num_rounds, SHIFT: tl.constexpr):
    """Three keys inside (low, high), ascending: evenly spaced values at first, evenly spaced keys at the end."""
    size = high - low
    a, b, c = low + size // 4, low + size // 2, low + size * 3 // 4
    if num_rounds < 6:
        bottom = value_of(low, SHIFT)
        step = (value_of(high - 1, SHIFT) - bottom) * 0.25
        a = key_of(bottom + step, SHIFT).to(tl.int64)
        b = key_of(bottom + step * 2.0, SHIFT).to(tl.int64)
        c = key_of(bottom + step * 3.0, SHIFT).to(tl.int64)
    a = tl.maximum(tl.minimum(a, high - 1), low + 1)
    b = tl.maximum(tl.minimum(b, high - 1), low + 1)
    c = tl.maximum(tl.minimum(c, high - 1), low + 1)
    return a, b, c
