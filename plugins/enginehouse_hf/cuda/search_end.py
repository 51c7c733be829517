"""Last kernel of a search: finds the end among the few collected tokens, with one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from enginehouse_hf.cuda.brackets import noted, reaches
from enginehouse_hf.cuda.keys import key_of, three_cuts, weight_of

__all__ = ["finish"]


@triton.jit
def _above(values, size, highest, inverse, a, b, c, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass and number of the collected tokens whose keys are at least a, b and c."""
    at_a, at_b, at_c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    num_a, num_b, num_c = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(values + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        key = tl.where(columns < size, key_of(value, SHIFT), -2147483648)
        weight = tl.exp((value - highest) * inverse)
        at_a += tl.where(key >= a, weight, 0.0)
        at_b += tl.where(key >= b, weight, 0.0)
        at_c += tl.where(key >= c, weight, 0.0)
        num_a += (key >= a).to(tl.int32)
        num_b += (key >= b).to(tl.int32)
        num_c += (key >= c).to(tl.int32)
    return (
        tl.sum(at_a.to(tl.float64), 0), tl.sum(at_b.to(tl.float64), 0), tl.sum(at_c.to(tl.float64), 0),
        tl.sum(num_a, 0).to(tl.float64), tl.sum(num_b, 0).to(tl.float64), tl.sum(num_c, 0).to(tl.float64),
    )  # fmt: skip


@triton.jit
def _pick(is_a, is_b, is_c, at_c, at_b, at_a, otherwise):
    """Return the entry of the highest cut whose condition is met."""
    return tl.where(is_c, at_c, tl.where(is_b, at_b, tl.where(is_a, at_a, otherwise)))


@triton.jit
def _shrunk(values, ids, size, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Keep the collected tokens with keys in [low, high), in order; return their number.

    Each write position is before the next read position, and barriers keep the threads in step.
    """
    seen = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=float("-inf"))
        token = tl.load(ids + index, mask=index < size, other=0)
        key = key_of(value.to(tl.float32), SHIFT)
        wanted = (key >= low) & (key < high) & (index < size)
        num_wanted = tl.sum(wanted.to(tl.int32), 0)
        tl.debug_barrier()
        if num_wanted > 0:
            place = seen + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(values + place, value, mask=wanted)
            tl.store(ids + place, token, mask=wanted)
        seen += num_wanted
    tl.debug_barrier()
    return seen


@triton.jit
def _locate(values, ids, size, key, rank, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the collected token that has ``rank`` others of the same key before it."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=float("-inf")).to(tl.float32)
        same = ((key_of(value, SHIFT) == key) & (index < size)).to(tl.int32)
        num_same = tl.sum(same, 0)
        if (seen <= rank) & (rank < seen + num_same):
            hit = (same > 0) & (tl.cumsum(same, 0) + seen == rank + 1)
            token = tl.load(ids + tl.max(tl.where(hit, index, 0), 0))
        seen += num_same
    return token


@triton.jit(do_not_specialize=["num_rows"])
def finish(
    rules, num_rows, records, values, ids, tokens, last, width,
    KIND: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """End the search among the collected tokens: store the mass left by a truncation, or the token."""
    index = tl.program_id(0)
    record = records + index * 48
    token = tl.load(record + 3).to(tl.int32)
    if (tl.load(record + 1).to(tl.int32) >> KIND) & 1 == 1:
        inverse = (1.0 / tl.load(rules + 2 * num_rows + index)).to(tl.float32)
        highest = tl.load(record).to(tl.float32)
        low, high, mass_low, mass_high, count_low, count_high, target, size = noted(record + 24)
        values += index.to(tl.int64) * width
        ids += index.to(tl.int64) * width
        mass_above, count_above = mass_high, count_high  # of tokens above the collected ones
        num_rounds = 0
        while high - low > 1:
            a, b, c = three_cuts(low, high, num_rounds, SHIFT)
            at_a, at_b, at_c, num_a, num_b, num_c = _above(values, size, highest, inverse, a, b, c, SHIFT, BLOCK)
            at_a, at_b, at_c = at_a + mass_above, at_b + mass_above, at_c + mass_above
            num_a, num_b, num_c = num_a + count_above, num_b + count_above, num_c + count_above
            is_a, is_b, is_c = (
                reaches(at_a, num_a, target, KIND), reaches(at_b, num_b, target, KIND),
                reaches(at_c, num_c, target, KIND),
            )  # fmt: skip
            high, mass_high, count_high = (
                _pick(is_a, is_b, is_c, high, c, b, a),
                _pick(is_a, is_b, is_c, mass_high, at_c, at_b, at_a),
                _pick(is_a, is_b, is_c, count_high, num_c, num_b, num_a),
            )
            low = _pick(is_a, is_b, is_c, c, b, a, low)
            mass_low = _pick(is_a, is_b, is_c, at_c, at_b, at_a, mass_low)
            count_low = _pick(is_a, is_b, is_c, num_c, num_b, num_a, count_low)
            if size > BLOCK:
                size = _shrunk(values, ids, size, low, high, SHIFT, BLOCK)
                mass_above, count_above = mass_high, count_high
            num_rounds += 1
        weight = weight_of(low, highest, inverse, SHIFT)
        if KIND == 0:
            kept = tl.maximum(tl.minimum(target, count_low) - count_high, 0.0)
            tl.store(record + 2, mass_high + weight * kept)
        if KIND == 1:
            more = tl.maximum(tl.ceil((target - mass_high) / weight), 1.0)
            tl.store(record + 2, tl.minimum(tl.load(record + 2), mass_high + weight * more))
        if KIND == 2:
            num_same = ((mass_low - mass_high) / weight + 0.5).to(tl.int32)
            rank = tl.floor((target - mass_high) / weight).to(tl.int32)
            token = _locate(values, ids, size, low, tl.maximum(tl.minimum(rank, num_same - 1), 0), SHIFT, BLOCK)
    if KIND == 2:
        slot = tl.load(rules + num_rows + index).to(tl.int64)
        tl.store(tokens + index, token)
        tl.store(last + slot, tl.maximum(token, 0))
