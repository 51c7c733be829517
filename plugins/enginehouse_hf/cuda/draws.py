"""Drawing tokens on the device: core's sampling specification as one Triton program per row of logits.

Tokens are ordered by logit descending, then id. Every truncation keeps a beginning of this order, so nothing is
sorted: a beginning is known by its probability mass, and where a mass ends is found by narrowing the range of logits,
in their order-preserving integer form, so that the search is exact. Two passes over the row tell between which two
logits it ends; the tokens there are set aside, and all further passes see fewer and fewer of them. A row depends on
no other, and sums are added in a fixed order, so a draw is the same in every batch.

Source: ``enginehouse.engine.sampling`` is the specification. Core adds in float64, this in float32 with float64 at the
end, so a draw that falls within about 1e-6 of a border may give the neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw_rows"]

_BLOCK = 4096
_WARPS = 16


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
def _range(row, width, BLOCK: tl.constexpr):
    """The smallest and largest finite logit, and whether a token can be drawn: no NaN, no +inf, not only -inf."""
    lows = tl.full([BLOCK], float("inf"), tl.float32)
    highs = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        value = _load(row, start, width, BLOCK)
        is_nan = value != value  # noqa: PLR0124 - that is what NaN is
        broken += is_nan.to(tl.int32)
        highs = tl.maximum(highs, tl.where(is_nan, float("-inf"), value))
        lows = tl.minimum(lows, tl.where(is_nan | (value == float("-inf")), float("inf"), value))
    highest = tl.max(highs, 0)
    is_fit = (tl.sum(broken, 0) == 0) & (highest < float("inf")) & (highest > float("-inf"))
    return tl.min(lows, 0), highest, is_fit


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
def _cuts(low, high, num_rounds, SHIFT: tl.constexpr):
    """Three keys inside (low, high), ascending: evenly spaced values at first, in the end evenly spaced keys."""
    size = high - low
    a, b, c = low + size // 4, low + size // 2, low + size * 3 // 4
    if num_rounds < 6:
        bottom = _value(low, SHIFT)
        step = (_value(high - 1, SHIFT) - bottom) * 0.25
        a = _key(bottom + step, SHIFT).to(tl.int64)
        b = _key(bottom + step * 2.0, SHIFT).to(tl.int64)
        c = _key(bottom + step * 3.0, SHIFT).to(tl.int64)
    a = tl.maximum(tl.minimum(a, high - 1), low + 1)
    b = tl.maximum(tl.minimum(b, high - 1), low + 1)
    c = tl.maximum(tl.minimum(c, high - 1), low + 1)
    return a, b, c


@triton.jit
def _narrow(low, high, at_low, at_high, a, b, c, at_a, at_b, at_c, is_a, is_b, is_c):
    """The range that still holds the largest key at which the condition is met, and the sums at its ends."""
    new_low = tl.where(is_c, c, tl.where(is_b, b, tl.where(is_a, a, low)))
    new_high = tl.where(is_c, high, tl.where(is_b, c, tl.where(is_a, b, a)))
    new_at_low = tl.where(is_c, at_c, tl.where(is_b, at_b, tl.where(is_a, at_a, at_low)))
    new_at_high = tl.where(is_c, at_high, tl.where(is_b, at_c, tl.where(is_a, at_b, at_a)))
    return new_low, new_high, new_at_low, new_at_high


@triton.jit
def _ladder(row, width, highest, inverse, heat, bottom, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Keys at some distances below the highest logit, in temperatures, and the masses from them upwards; and all."""
    a = tl.maximum(_key(highest - 9.0 * heat, SHIFT).to(tl.int64), bottom)
    b = tl.maximum(_key(highest - 6.0 * heat, SHIFT).to(tl.int64), bottom)
    c = tl.maximum(_key(highest - 4.0 * heat, SHIFT).to(tl.int64), bottom)
    d = tl.maximum(_key(highest - 2.0 * heat, SHIFT).to(tl.int64), bottom)
    at_all = tl.zeros([BLOCK], tl.float32)
    at_a = tl.zeros([BLOCK], tl.float32)
    at_b = tl.zeros([BLOCK], tl.float32)
    at_c = tl.zeros([BLOCK], tl.float32)
    at_d = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        value = _load(row, start, width, BLOCK)
        key = _key(value, SHIFT)
        weight = tl.exp((value - highest) * inverse)
        at_all += weight
        at_a += tl.where(key >= a, weight, 0.0)
        at_b += tl.where(key >= b, weight, 0.0)
        at_c += tl.where(key >= c, weight, 0.0)
        at_d += tl.where(key >= d, weight, 0.0)
    return (
        a, b, c, d,
        tl.sum(at_all.to(tl.float64), 0), tl.sum(at_a.to(tl.float64), 0), tl.sum(at_b.to(tl.float64), 0),
        tl.sum(at_c.to(tl.float64), 0), tl.sum(at_d.to(tl.float64), 0),
    )  # fmt: skip


@triton.jit
def _reaches(mass, target, IS_STRICT: tl.constexpr):
    if IS_STRICT:
        return mass > target
    return mass >= target


@triton.jit
def _collect(source, size, low, high, values, ids, IS_ROW: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the tokens with keys in [low, high), in order of their ids, to ``values`` and ``ids``; how many there are.

    ``source`` is the whole row, or ``values`` itself, which then shrinks in place: what is written lies before what is
    read next, and the sum in each turn keeps the threads together.
    """
    seen = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # what an earlier search wrote here has been read
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        value = tl.load(source + index, mask=inside, other=float("-inf"))
        token = index
        if not IS_ROW:
            token = tl.load(ids + index, mask=inside, other=0)
        key = _key(value.to(tl.float32), SHIFT)
        wanted = (key >= low) & (key < high) & inside
        num_wanted = tl.sum(wanted.to(tl.int32), 0)
        tl.debug_barrier()
        if num_wanted > 0:
            place = seen + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(values + place, value, mask=wanted)
            tl.store(ids + place, token, mask=wanted)
        seen += num_wanted
    tl.debug_barrier()  # every thread sees what the others wrote
    return seen


@triton.jit
def _find_mass(
    row, width, highest, inverse, target, bottom, top, ladder, values, ids,
    IS_STRICT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key at which the tokens from it upwards hold ``target``; their mass, and that of those above it.

    Also how many tokens are collected in ``values`` and ``ids``: those between two rungs of the ladder at first, then
    ever fewer, all of them with keys around the one that is looked for.
    """
    a, b, c, d, total, at_a, at_b, at_c, at_d = ladder
    low, high, at_low, at_high = bottom, top, total, total * 0.0
    is_b, is_c = _reaches(at_b, target, IS_STRICT), _reaches(at_c, target, IS_STRICT)
    is_d = _reaches(at_d, target, IS_STRICT)
    low, high, at_low, at_high = _narrow(low, high, at_low, at_high, b, c, d, at_b, at_c, at_d, is_b, is_c, is_d)
    if (low == bottom) & (a < high):
        is_a = _reaches(at_a, target, IS_STRICT)
        high, at_high = tl.where(is_a, high, a), tl.where(is_a, at_high, at_a)
        low, at_low = tl.where(is_a, a, low), tl.where(is_a, at_a, at_low)
    size = _collect(row, width, low, high, values, ids, True, SHIFT, BLOCK)
    above = at_high  # of what is collected; everything collected lies below
    num_rounds = 0
    while high - low > 1:
        x, y, z = _cuts(low, high, num_rounds, SHIFT)
        at_x, at_y, at_z = _masses(values, size, highest, inverse, x, y, z, SHIFT, BLOCK)
        at_x, at_y, at_z = at_x + above, at_y + above, at_z + above
        low, high, at_low, at_high = _narrow(
            low, high, at_low, at_high, x, y, z, at_x, at_y, at_z,
            _reaches(at_x, target, IS_STRICT), _reaches(at_y, target, IS_STRICT), _reaches(at_z, target, IS_STRICT),
        )  # fmt: skip
        if size > BLOCK:
            size = _collect(values, size, low, high, values, ids, False, SHIFT, BLOCK)
            above = at_high
        num_rounds += 1
    return low, at_low, at_high, size


@triton.jit
def _find_count(row, width, wanted, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that at least ``wanted`` tokens reach (``low`` if none), how many do, and how many lie above."""
    at_low, at_high = width, width * 0
    num_rounds = 0
    while high - low > 1:
        a, b, c = _cuts(low, high, num_rounds, SHIFT)
        at_a, at_b, at_c = _counts(row, width, a, b, c, SHIFT, BLOCK)
        low, high, at_low, at_high = _narrow(
            low, high, at_low, at_high, a, b, c, at_a, at_b, at_c, at_a >= wanted, at_b >= wanted, at_c >= wanted
        )
        num_rounds += 1
    return low, at_low, at_high


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
def _weight(key, highest, inverse, SHIFT: tl.constexpr):
    return tl.exp((_value(key, SHIFT) - highest) * inverse).to(tl.float64)


@triton.jit
def _draw_weighted(
    row, width, lowest, highest, temperature, top_k, top_p, min_p, number, values, ids,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Truncate, each step to what the one before it left, and draw."""
    inverse = (1.0 / temperature).to(tl.float32)
    heat = temperature.to(tl.float32)
    bottom = _key(lowest, SHIFT).to(tl.int64)
    top = _key(highest, SHIFT).to(tl.int64) + 1
    ladder = _ladder(row, width, highest, inverse, heat, bottom, SHIFT, BLOCK)
    mass = ladder[4]
    if (top_k > 0) & (top_k < width):
        key, reached, above = _find_count(row, width, top_k, bottom, top, SHIFT, BLOCK)
        mass_above, _, _ = _masses(row, width, highest, inverse, key + 1, key + 1, key + 1, SHIFT, BLOCK)
        kept = tl.maximum(tl.minimum(top_k, reached) - above, 0)
        mass = tl.minimum(mass, mass_above + _weight(key, highest, inverse, SHIFT) * kept)
    if top_p < 1.0:
        target = top_p * mass
        key, _, mass_above, _ = _find_mass(
            row, width, highest, inverse, target, bottom, top, ladder, values, ids, False, SHIFT, BLOCK
        )
        weight = _weight(key, highest, inverse, SHIFT)
        mass = tl.minimum(mass, mass_above + weight * tl.maximum(tl.ceil((target - mass_above) / weight), 1.0))
    if min_p > 0.0:
        key = _key(highest + tl.log(min_p.to(tl.float32)) * heat, SHIFT).to(tl.int64)
        # The key of this floor rounds down; one step up where that let in what is too improbable.
        if _weight(key, highest, inverse, SHIFT) < min_p * (1.0 - 1e-6):
            key += 1
        mass_min, _, _ = _masses(row, width, highest, inverse, key, key, key, SHIFT, BLOCK)
        mass = tl.minimum(mass, mass_min)
    target = number * mass
    key, reached_mass, mass_above, size = _find_mass(
        row, width, highest, inverse, target, bottom, top, ladder, values, ids, True, SHIFT, BLOCK
    )
    weight = _weight(key, highest, inverse, SHIFT)
    num_same = ((reached_mass - mass_above) / weight + 0.5).to(tl.int32)
    rank = tl.floor((target - mass_above) / weight).to(tl.int32)
    rank = tl.maximum(tl.minimum(rank, num_same - 1), 0)
    return tl.load(ids + tl.maximum(_locate(values, size, key, rank, SHIFT, BLOCK), 0))


@triton.jit(do_not_specialize=["num_rows"])
def _draw(
    logits, stride, rules, num_rows, tokens, last, values, ids, width,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    slot = tl.load(rules + num_rows + index).to(tl.int64)
    temperature = tl.load(rules + 2 * num_rows + index)
    top_k = tl.load(rules + 3 * num_rows + index).to(tl.int32)
    top_p = tl.load(rules + 4 * num_rows + index)
    min_p = tl.load(rules + 5 * num_rows + index)
    number = tl.load(rules + 6 * num_rows + index)
    lowest, highest, is_fit = _range(row, width, BLOCK)
    token = tl.full([], -1, tl.int32)
    if is_fit:
        if temperature == 0.0:
            token = _locate(row, width, _key(highest, SHIFT).to(tl.int64), 0, SHIFT, BLOCK)
        else:
            values += index.to(tl.int64) * width
            ids += index.to(tl.int64) * width
            token = _draw_weighted(
                row, width, lowest, highest, temperature, top_k, top_p, min_p, number, values, ids, SHIFT, BLOCK
            )
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
    num_rows, width = rules.shape[1], logits.shape[1]
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
    values = torch.empty(num_rows, width, dtype=logits.dtype, device=device)  # where searches set tokens aside
    ids = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _draw[(num_rows,)](
        logits, logits.stride(0), rules, num_rows, tokens, last, values, ids, width, _SHIFTS[logits.dtype], block,
        num_warps=_WARPS if block == _BLOCK else 4,
    )  # fmt: skip
    return tokens
