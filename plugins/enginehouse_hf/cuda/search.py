"""Kernels of ``draws.py``: search for the end of a prefix of the tokens, ordered by logit.

``kind`` is 0 for the ``top_k`` most probable tokens, 1 for the smallest set with mass ``top_p``, 2 for the draw. A
search narrows a bracket of keys, which are logits as order-preserving integers. The state of a row is a record of 48
float64 numbers: the largest logit, the requested kinds (bits), the mass left by truncations, the greedy token; from 8
on three brackets (before, between and after the two turns of :func:`refine`), each consisting of ``low`` and ``high``,
mass and number of the tokens from each of them upwards, the search target, and the number of tokens inside; from 32 on
the eight cuts of each turn.

The parts of a row run in parallel. The last to finish (:func:`_is_last`) narrows the bracket for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from enginehouse_hf.cuda.brackets import note, noted, reaches
from enginehouse_hf.cuda.keys import even_cuts, first_cuts, key_of, least_key

__all__ = ["collect", "refine", "survey"]


@triton.jit
def _is_last(arrivals, parts):
    """Mark this part as stored; True if all parts are, so their numbers can be read."""
    tl.debug_barrier()  # all threads of this part have stored
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == parts - 1


@triton.jit(do_not_specialize=["num_rows"])
def survey(
    logits, stride, rules, num_rows, records, ends, arrivals, width,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Find the ends of a row and its first best token, and initialise its record; NaN makes its largest logit +inf."""
    index, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    columns = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # noqa: PLR0124 - that is what NaN is
    high = tl.max(value, 0)
    cell = ends + (index * parts + part) * 3
    tl.store(cell, tl.min(tl.where(value == float("-inf"), float("inf"), value), 0))
    tl.store(cell + 1, high)
    tl.store(cell + 2, tl.min(tl.where(value == high, columns, width), 0).to(tl.float32))
    if _is_last(arrivals + index, parts):
        _begin(rules, index, num_rows, records + index * 48, ends + index * parts * 3, width, parts, SHIFT, PARTS)


@triton.jit
def _begin(rules, index, num_rows, record, ends, width, parts, SHIFT: tl.constexpr, PARTS: tl.constexpr):
    """Write the initial state of all searches."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    lowest = tl.min(tl.load(ends + part * 3, mask=inside, other=float("inf"), cache_modifier=".cg"), 0)
    highs = tl.load(ends + part * 3 + 1, mask=inside, other=float("-inf"), cache_modifier=".cg")
    places = tl.load(ends + part * 3 + 2, mask=inside, other=0.0, cache_modifier=".cg")
    highest = tl.max(highs, 0)
    is_fit = (highest < float("inf")) & (highest > float("-inf"))
    temperature, top_k = tl.load(rules + 2 * num_rows + index), tl.load(rules + 3 * num_rows + index)
    top_p, min_p = tl.load(rules + 4 * num_rows + index), tl.load(rules + 5 * num_rows + index)
    is_weighted = (is_fit & (temperature > 0.0)).to(tl.int32)
    wanted = is_weighted * (4 + ((top_k > 0.0) & (top_k < width)).to(tl.int32) + 2 * (top_p < 1.0).to(tl.int32))
    greedy = tl.min(tl.where((highs == highest) & inside, places, width), 0)
    tl.store(record, highest.to(tl.float64))
    tl.store(record + 1, wanted.to(tl.float64))
    tl.store(record + 2, temperature * 0.0 + float("inf"))
    tl.store(record + 3, tl.where(is_fit, greedy, -1.0).to(tl.float64))
    if is_weighted > 0:
        temperature32, inverse = temperature.to(tl.float32), (1.0 / temperature).to(tl.float32)
        low, high = key_of(lowest, SHIFT).to(tl.int64), key_of(highest, SHIFT).to(tl.int64) + 1
        least = least_key(min_p, highest, temperature32, inverse, low, SHIFT)
        nothing = temperature * 0.0
        note(record + 8, low, high, nothing, nothing, nothing, nothing, nothing, 0)
        tl.store(
            record + 32 + tl.arange(0, 8), first_cuts(highest, temperature32, low, high, least, SHIFT).to(tl.float64)
        )


@triton.jit(do_not_specialize=["num_rows", "kind"])
def refine(
    logits, stride, rules, num_rows, records, sums, counts, offsets, arrivals, width, kind,
    TURN: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum this part's tokens above each cut; the last part narrows the bracket to the interval between two cuts."""
    index, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record, column = records + index * 48, tl.arange(0, 8)
    if (tl.load(record + 1).to(tl.int32) >> kind) & 1 == 0:
        return
    inverse = (1.0 / tl.load(rules + 2 * num_rows + index)).to(tl.float32)
    highest = tl.load(record).to(tl.float32)
    high = tl.load(record + 9 + 8 * TURN).to(tl.int32)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    columns = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    key = key_of(value, SHIFT)
    is_below = (key < high) & (columns < width)
    weight = tl.where(is_below, tl.exp((value - highest) * inverse), 0.0)
    key = tl.where(is_below, key, -2147483648)
    found, number = tl.zeros([8], tl.float32), tl.zeros([8], tl.int32)
    for place in tl.static_range(8):
        cut = tl.load(record + 32 + 8 * TURN + place).to(tl.int32)
        found = tl.where(column == place, tl.sum(tl.where(key >= cut, weight, 0.0), 0), found)
        if (kind == 0) | (TURN == 1):
            number = tl.where(column == place, tl.sum((key >= cut).to(tl.int32), 0), number)
    at = (index * parts + part) * 8 + column
    tl.store(sums + at, found)
    tl.store(counts + at, number)
    if _is_last(arrivals + index, parts):
        own = index * parts
        _narrow(rules, index, num_rows, record, sums + own * 8, counts + own * 8, offsets + own, parts,
                kind, TURN, SHIFT, PARTS)  # fmt: skip


@triton.jit
def _narrow(rules, index, num_rows, record, sums, counts, offsets, parts,
            kind, TURN: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Narrow the bracket by the sums at the cuts; store the offsets of its tokens or the next cuts."""
    part, column = tl.arange(0, PARTS), tl.arange(0, 8)
    at, inside = part[:, None] * 8 + column[None, :], (part < parts)[:, None]
    low, high, mass_low, mass_high, count_low, count_high, target, _ = noted(record + 8 + 8 * TURN)
    cut = tl.load(record + 32 + 8 * TURN + column).to(tl.int64)
    number = tl.load(counts + at, mask=inside, other=0, cache_modifier=".cg")
    mass = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
    mass = tl.sum(mass.to(tl.float64), 0) + mass_high
    count = tl.sum(number, 0).to(tl.float64) + count_high
    if kind == 0:
        target = tl.load(rules + 3 * num_rows + index)
    elif TURN == 0:
        whole = tl.minimum(tl.load(record + 2), tl.max(tl.where(column == 0, mass, 0.0), 0))
        if kind == 1:
            # With 0 a cut above all tokens would suffice; the most probable token has more mass than this.
            target = tl.maximum(tl.load(rules + 4 * num_rows + index), 1e-9) * whole
        else:
            if tl.load(rules + 5 * num_rows + index) > 0.0:
                whole = tl.minimum(whole, tl.max(tl.where(column == 7, mass, 0.0), 0))
            target = tl.load(rules + 6 * num_rows + index) * whole
    is_reached = reaches(mass, count, target, kind)
    new_low = tl.max(tl.where(is_reached, cut, low), 0)
    new_high = tl.min(tl.where((cut > new_low) & (is_reached == 0), cut, high), 0)
    if new_high < high:
        mass_high = tl.max(tl.where(cut == new_high, mass, 0.0), 0)
        count_high = tl.max(tl.where(cut == new_high, count, 0.0), 0)
    mass_low = tl.max(tl.where(cut == new_low, mass, 0.0), 0)
    count_low = tl.max(tl.where(cut == new_low, count, 0.0), 0)
    of_part = tl.max(tl.where(cut[None, :] == new_low, number, 0), 1)
    of_part -= tl.max(tl.where(cut[None, :] == new_high, number, 0), 1)
    size = tl.sum(of_part, 0)
    note(record + 16 + 8 * TURN, new_low, new_high, mass_low, mass_high, count_low, count_high, target, size)
    if TURN == 0:
        tl.store(record + 40 + column, even_cuts(new_low, new_high, SHIFT).to(tl.float64))
    else:
        tl.store(offsets + part, tl.cumsum(of_part, 0) - of_part, mask=part < parts)


@triton.jit(do_not_specialize=["kind"])
def collect(
    logits, stride, rules, records, offsets, values, ids, width, kind,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Collect this part's tokens inside the bracket, after those of the preceding parts."""
    index, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record = records + index * 48
    if (tl.load(record + 1).to(tl.int32) >> kind) & 1 == 0:
        return
    low, high = tl.load(record + 24).to(tl.int32), tl.load(record + 25).to(tl.int32)
    target = index.to(tl.int64) * width + tl.load(offsets + index * parts + part)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    for start in tl.static_range(0, BLOCK, TILE):
        columns = part * BLOCK + start + tl.arange(0, TILE)
        value = tl.load(row + columns, mask=columns < width, other=float("-inf"))
        key = key_of(value.to(tl.float32), SHIFT)
        wanted = ((key >= low) & (key < high) & (columns < width)).to(tl.int32)
        num_wanted = tl.sum(wanted, 0)
        if num_wanted > 0:
            place = target + tl.cumsum(wanted, 0) - 1
            tl.store(values + place, value, mask=wanted > 0)
            tl.store(ids + place, columns, mask=wanted > 0)
        target += num_wanted
