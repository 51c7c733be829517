"""Drawing tokens on the device: core's sampling specification as one Triton program per row of logits.

Tokens are ordered by logit descending, then id. Every truncation keeps a beginning of this order, so nothing is
sorted: a beginning is known by its probability mass, and where a mass ends is found by narrowing the range of logits
(in their order-preserving integer form, so the search is exact) with one pass over the row per narrowing. A row depends
on no other, and sums are added in a fixed order, so a draw is the same in every batch.

Source: ``enginehouse.engine.sampling`` is the specification. Core adds in float64, this in float32 with float64 at the
end, so a draw that falls within about 1e-6 of a border may give the neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw_rows"]

_BLOCK = 8192


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """An integer that sorts like the float32 ``value``; ``SHIFT`` drops bits that the dtype of the logits lacks."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 whose key this is."""
    bits = (key << SHIFT).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(row, start, width, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    return tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)


@triton.jit
def _masses(row, width, highest, inverse, a, b, c, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Weights ``exp((logit - highest) * inverse)`` of the tokens whose key is at least a, b and c, added up."""
    at_a = tl.zeros([BLOCK], tl.float32)
    at_b = tl.zeros([BLOCK], tl.float32)
    at_c = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        value = _load(row, start, width, BLOCK)
        key = _key(value, SHIFT)
        weight = tl.exp((value - highest) * inverse)
        at_a += tl.where(key >= a, weight, 0.0)
        at_b += tl.where(key >= b, weight, 0.0)
        at_c += tl.where(key >= c, weight, 0.0)
    return tl.sum(at_a.to(tl.float64), 0), tl.sum(at_b.to(tl.float64), 0), tl.sum(at_c.to(tl.float64), 0)


@triton.jit
def _counts(row, width, a, b, c, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a key of at least a, b and c."""
    at_a = tl.zeros([BLOCK], tl.int32)
    at_b = tl.zeros([BLOCK], tl.int32)
    at_c = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        key = _key(tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32), SHIFT)
        at_a += ((key >= a) & inside).to(tl.int32)
        at_b += ((key >= b) & inside).to(tl.int32)
        at_c += ((key >= c) & inside).to(tl.int32)
    return tl.sum(at_a, 0), tl.sum(at_b, 0), tl.sum(at_c, 0)


@triton.jit
def _narrow(low, high, at_a, at_b, at_c, a, b, c):
    """The range that still holds the largest key for which the condition was met."""
    new_low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, low)))
    new_high = tl.where(at_c, high, tl.where(at_b, c, tl.where(at_a, b, a)))
    return new_low, new_high


@triton.jit
def _key_at_mass(
    row, width, highest, inverse, low, high, target, IS_STRICT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key at which the tokens from it upwards hold ``target``; ``low`` if rounded sums fall short."""
    while high - low > 1:
        size = high - low
        a, b, c = low + size // 4, low + size // 2, low + size * 3 // 4
        mass_a, mass_b, mass_c = _masses(row, width, highest, inverse, a, b, c, SHIFT, BLOCK)
        if IS_STRICT:
            low, high = _narrow(low, high, mass_a > target, mass_b > target, mass_c > target, a, b, c)
        else:
            low, high = _narrow(low, high, mass_a >= target, mass_b >= target, mass_c >= target, a, b, c)
    return low


@triton.jit
def _key_at_count(row, width, low, high, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that at least ``wanted`` tokens reach."""
    while high - low > 1:
        size = high - low
        a, b, c = low + size // 4, low + size // 2, low + size * 3 // 4
        num_a, num_b, num_c = _counts(row, width, a, b, c, SHIFT, BLOCK)
        low, high = _narrow(low, high, num_a >= wanted, num_b >= wanted, num_c >= wanted, a, b, c)
    return low


@triton.jit
def _locate(row, width, key, rank, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the token that has ``rank`` others of the same key before it."""
    token = tl.full([], -1, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        found = _key(tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32), SHIFT)
        same = ((found == key) & inside).to(tl.int32)
        num_same = tl.sum(same, 0)
        if (seen <= rank) & (rank < seen + num_same):
            place = tl.cumsum(same, 0) + seen
            hit = (same > 0) & (place == rank + 1)
            token = tl.max(tl.where(hit, columns, -1), 0)
        seen += num_same
    return token


@triton.jit
def _mass_from(row, width, highest, inverse, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the tokens whose key is at least ``key``."""
    mass, _, _ = _masses(row, width, highest, inverse, key, key, key, SHIFT, BLOCK)
    return mass


@triton.jit
def _kept_mass(
    row, width, highest, temperature, bottom, top, top_k, top_p, min_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Mass of the beginning that the truncations leave, each applied to what the one before it left."""
    inverse = (1.0 / temperature).to(tl.float32)
    mass = _mass_from(row, width, highest, inverse, bottom, SHIFT, BLOCK)
    if (top_k > 0) & (top_k < width):
        key = _key_at_count(row, width, bottom, top, top_k, SHIFT, BLOCK)
        above, reached, _ = _counts(row, width, key + 1, key, key, SHIFT, BLOCK)
        mass_above = _mass_from(row, width, highest, inverse, key + 1, SHIFT, BLOCK)
        weight = tl.exp((_value(key, SHIFT) - highest) * inverse).to(tl.float64)
        mass = tl.minimum(mass, mass_above + weight * tl.maximum(tl.minimum(top_k, reached) - above, 0))
    if top_p < 1.0:
        target = top_p * mass
        key = _key_at_mass(row, width, highest, inverse, bottom, top, target, False, SHIFT, BLOCK)
        mass_above = _mass_from(row, width, highest, inverse, key + 1, SHIFT, BLOCK)
        weight = tl.exp((_value(key, SHIFT) - highest) * inverse).to(tl.float64)
        num_more = tl.maximum(tl.ceil((target - mass_above) / weight), 1.0)
        mass = tl.minimum(mass, mass_above + weight * num_more)
    if min_p > 0.0:
        floor = highest + tl.log(min_p.to(tl.float32)) * temperature.to(tl.float32)
        key = _key(floor, SHIFT).to(tl.int64)
        # The key of the floor rounds down; one step up where that let in what is too improbable.
        if tl.exp((_value(key, SHIFT) - highest) * inverse) < min_p.to(tl.float32) * (1.0 - 1e-6):
            key += 1
        mass = tl.minimum(mass, _mass_from(row, width, highest, inverse, key, SHIFT, BLOCK))
    return mass


@triton.jit
def _highest(row, width, BLOCK: tl.constexpr):
    """The largest logit, and whether the row is fit for a draw: no NaN, no +inf, not only -inf."""
    highs = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        value = _load(row, start, width, BLOCK)
        is_nan = value != value  # noqa: PLR0124 - that is what NaN is
        broken += is_nan.to(tl.int32)
        highs = tl.maximum(highs, tl.where(is_nan, float("-inf"), value))
    highest = tl.max(highs, 0)
    is_fit = (tl.sum(broken, 0) == 0) & (highest < float("inf")) & (highest > float("-inf"))
    return highest, is_fit


@triton.jit(do_not_specialize=["num_rows"])
def _draw(logits, stride, rules, num_rows, tokens, last, WIDTH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    slot = tl.load(rules + num_rows + index).to(tl.int64)
    temperature = tl.load(rules + 2 * num_rows + index)
    top_k = tl.load(rules + 3 * num_rows + index).to(tl.int32)
    top_p = tl.load(rules + 4 * num_rows + index)
    min_p = tl.load(rules + 5 * num_rows + index)
    number = tl.load(rules + 6 * num_rows + index)
    width = WIDTH

    highest, is_fit = _highest(row, width, BLOCK)
    top_key = _key(highest, SHIFT).to(tl.int64)
    token = tl.full([], -1, tl.int32)
    if is_fit:
        if temperature == 0.0:
            token = _locate(row, width, top_key, 0, SHIFT, BLOCK)
        else:
            # Keys of -inf lie below every finite one; no mass is there, so the search may begin above it.
            bottom = _key(tl.full([], float("-inf"), tl.float32), SHIFT).to(tl.int64) + 1
            top = top_key + 1
            mass = _kept_mass(row, width, highest, temperature, bottom, top, top_k, top_p, min_p, SHIFT, BLOCK)
            target = number * mass
            inverse = (1.0 / temperature).to(tl.float32)
            key = _key_at_mass(row, width, highest, inverse, bottom, top, target, True, SHIFT, BLOCK)
            mass_above, reached, _ = _masses(row, width, highest, inverse, key + 1, key, key, SHIFT, BLOCK)
            weight = tl.exp((_value(key, SHIFT) - highest) * inverse).to(tl.float64)
            num_same = ((reached - mass_above) / weight + 0.5).to(tl.int32)
            rank = tl.floor((target - mass_above) / weight).to(tl.int32)
            token = _locate(row, width, key, tl.maximum(tl.minimum(rank, num_same - 1), 0), SHIFT, BLOCK)
    tl.store(tokens + index, token)
    tl.store(last + slot, tl.maximum(token, 0))


_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def draw_rows(logits: Tensor, rules: Tensor, last: Tensor) -> Tensor:
    """Draw one token from each of some rows.

    Args:
        logits: (num_rows_in_all, vocab_size), contiguous; -inf where a token is not allowed.
        rules: (7, num_rows) float64: row of ``logits``, slot, temperature, top_k (0 off), top_p (1 off), min_p (0 off),
            and the number in [0, 1) that decides.
        last: (num_slots,) int32; the token of each row's slot is put there.

    Returns:
        (num_rows,) int32 token ids; -1 where a row holds NaN or +inf, or nothing but -inf.
    """
    num_rows = rules.shape[1]
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    width = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(width))
    warps = 16 if block >= 8192 else 4
    _draw[(num_rows,)](
        logits, logits.stride(0), rules, num_rows, tokens, last, width, _SHIFTS[logits.dtype], block, num_warps=warps
    )
    return tokens
