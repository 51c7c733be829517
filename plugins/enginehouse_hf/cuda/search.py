"""The kernels behind ``draws.py``: searches for where a beginning of the tokens, ordered by logit, ends.

``KIND`` is 0 for the ``top_k`` most probable tokens, 1 for the fewest that hold ``top_p``, 2 for the draw. A search
narrows a bracket of keys, which are logits as integers that sort alike. What is known of a row lies in its record of
48 float64 numbers: the largest logit, which kinds are wanted (bits), the mass that truncations have left, the greedy
token; from 8 on three brackets (before, between and after the two turns of :func:`refine`), each of ``low`` and
``high``, mass and number of the tokens from each of them upwards, what the search is for, and how many tokens lie
inside; from 32 on the eight cuts of each turn.

The parts of a row run side by side. Whichever is done last (:func:`_is_last`) narrows the bracket for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["collect", "finish", "refine", "survey"]


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
def _weight(key, highest, inverse, SHIFT: tl.constexpr):
    return tl.exp((_value(key, SHIFT) - highest) * inverse).to(tl.float64)


@triton.jit
def _is_last(arrivals, parts):
    """Note that this part has stored what it found; whether all others have, and their numbers can be read."""
    tl.debug_barrier()  # every thread of this part has stored
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == parts - 1


@triton.jit(do_not_specialize=["num_rows"])
def survey(
    logits, stride, rules, num_rows, records, ends, arrivals, width,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Find the ends of a row and its first best token, and begin its record; with a NaN its largest logit is +inf."""
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
    """Write what all searches start from."""
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
        heat, inverse = temperature.to(tl.float32), (1.0 / temperature).to(tl.float32)
        low, high = _key(lowest, SHIFT).to(tl.int64), _key(highest, SHIFT).to(tl.int64) + 1
        least = _least_key(min_p, highest, heat, inverse, low, SHIFT)
        nothing = temperature * 0.0
        _note(record + 8, low, high, nothing, nothing, nothing, nothing, nothing, 0)
        tl.store(record + 32 + tl.arange(0, 8), _first_cuts(highest, heat, low, high, least, SHIFT).to(tl.float64))


@triton.jit
def _least_key(min_p, highest, heat, inverse, bottom, SHIFT: tl.constexpr):
    """The smallest key that ``min_p`` allows; ``bottom`` when there is none."""
    key = bottom
    if min_p > 0.0:
        key = _key(highest + tl.log(min_p.to(tl.float32)) * heat, SHIFT).to(tl.int64)
        # The key of this floor rounds down; one step up where that let in what is too improbable.
        if _weight(key, highest, inverse, SHIFT) < min_p * (1.0 - 1e-6):
            key += 1
    return tl.maximum(key, bottom)


@triton.jit
def _first_cuts(highest, heat, bottom, top, least, SHIFT: tl.constexpr):
    """The bottom, keys at some distances below the highest logit, in temperatures, and the key of ``min_p``."""
    column = tl.arange(0, 8)
    far = tl.where(column == 3, 5.0, tl.where(column == 4, 3.5, tl.where(column == 5, 2.2, 1.0)))
    far = tl.where(column == 1, 10.0, tl.where(column == 2, 7.0, far))
    cuts = _key(highest - far * heat, SHIFT).to(tl.int64)
    cuts = tl.where(column == 0, bottom, tl.where(column == 7, least, cuts))
    return tl.minimum(tl.maximum(cuts, bottom), top - 1)


@triton.jit
def _even_cuts(low, high, SHIFT: tl.constexpr):
    """``low``, and seven keys between it and ``high`` whose values are evenly spaced."""
    column = tl.arange(0, 8)
    bottom = _value(low, SHIFT)
    step = (_value(high - 1, SHIFT) - bottom) * 0.125
    cuts = _key(bottom + step * column.to(tl.float32), SHIFT).to(tl.int64)
    cuts = tl.where(column == 0, low, cuts)
    return tl.minimum(tl.maximum(cuts, low), high - 1)


@triton.jit
def _reaches(mass, count, target, KIND: tl.constexpr):
    """Whether what lies above a cut is enough."""
    if KIND == 0:
        return count >= target
    if KIND == 1:
        return mass >= target
    return mass > target


@triton.jit
def _noted(bracket):
    """A bracket, as :func:`_note` left it."""
    return (
        tl.load(bracket).to(tl.int64), tl.load(bracket + 1).to(tl.int64), tl.load(bracket + 2), tl.load(bracket + 3),
        tl.load(bracket + 4), tl.load(bracket + 5), tl.load(bracket + 6), tl.load(bracket + 7).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _note(bracket, low, high, mass_low, mass_high, count_low, count_high, target, size):
    tl.store(bracket, low.to(tl.float64))
    tl.store(bracket + 1, high.to(tl.float64))
    tl.store(bracket + 2, mass_low)
    tl.store(bracket + 3, mass_high)
    tl.store(bracket + 4, count_low)
    tl.store(bracket + 5, count_high)
    tl.store(bracket + 6, target)
    tl.store(bracket + 7, target * 0.0 + size)


@triton.jit(do_not_specialize=["num_rows"])
def refine(
    logits, stride, rules, num_rows, records, sums, counts, offsets, arrivals, width,
    KIND: tl.constexpr, TURN: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up this part's tokens from each cut upwards; the last part narrows the bracket to what lies between two."""
    index, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record, column = records + index * 48, tl.arange(0, 8)
    if (tl.load(record + 1).to(tl.int32) >> KIND) & 1 == 0:
        return
    inverse = (1.0 / tl.load(rules + 2 * num_rows + index)).to(tl.float32)
    highest = tl.load(record).to(tl.float32)
    high = tl.load(record + 9 + 8 * TURN).to(tl.int32)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    columns = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    key = _key(value, SHIFT)
    is_below = (key < high) & (columns < width)
    weight = tl.where(is_below, tl.exp((value - highest) * inverse), 0.0)
    key = tl.where(is_below, key, -2147483648)
    found, number = tl.zeros([8], tl.float32), tl.zeros([8], tl.int32)
    for place in tl.static_range(8):
        cut = tl.load(record + 32 + 8 * TURN + place).to(tl.int32)
        found = tl.where(column == place, tl.sum(tl.where(key >= cut, weight, 0.0), 0), found)
        if (TURN == 1) | (KIND == 0):
            number = tl.where(column == place, tl.sum((key >= cut).to(tl.int32), 0), number)
    at = (index * parts + part) * 8 + column
    tl.store(sums + at, found)
    tl.store(counts + at, number)
    if _is_last(arrivals + index, parts):
        own = index * parts
        _narrow(rules, index, num_rows, record, sums + own * 8, counts + own * 8, offsets + own, parts,
                KIND, TURN, SHIFT, PARTS)  # fmt: skip


@triton.jit
def _narrow(rules, index, num_rows, record, sums, counts, offsets, parts,
            KIND: tl.constexpr, TURN: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The bracket that the sums at the cuts leave, and where its tokens will be set aside or which cuts come next."""
    part, column = tl.arange(0, PARTS), tl.arange(0, 8)
    at, inside = part[:, None] * 8 + column[None, :], (part < parts)[:, None]
    low, high, mass_low, mass_high, count_low, count_high, target, _ = _noted(record + 8 + 8 * TURN)
    cut = tl.load(record + 32 + 8 * TURN + column).to(tl.int64)
    number = tl.load(counts + at, mask=inside, other=0, cache_modifier=".cg")
    mass = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
    mass = tl.sum(mass.to(tl.float64), 0) + mass_high
    count = tl.sum(number, 0).to(tl.float64) + count_high
    if KIND == 0:
        target = tl.load(rules + 3 * num_rows + index)
    elif TURN == 0:
        whole = tl.minimum(tl.load(record + 2), tl.max(tl.where(column == 0, mass, 0.0), 0))
        if KIND == 1:
            target = tl.load(rules + 4 * num_rows + index) * whole
        else:
            if tl.load(rules + 5 * num_rows + index) > 0.0:
                whole = tl.minimum(whole, tl.max(tl.where(column == 7, mass, 0.0), 0))
            target = tl.load(rules + 6 * num_rows + index) * whole
    is_reached = _reaches(mass, count, target, KIND)
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
    _note(record + 16 + 8 * TURN, new_low, new_high, mass_low, mass_high, count_low, count_high, target, size)
    if TURN == 0:
        tl.store(record + 40 + column, _even_cuts(new_low, new_high, SHIFT).to(tl.float64))
    else:
        tl.store(offsets + part, tl.cumsum(of_part, 0) - of_part, mask=part < parts)


@triton.jit
def collect(
    logits, stride, rules, records, offsets, values, ids, width,
    KIND: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set this part's tokens inside the bracket aside, behind those of the parts before it."""
    index, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record = records + index * 48
    if (tl.load(record + 1).to(tl.int32) >> KIND) & 1 == 0:
        return
    low, high = tl.load(record + 24).to(tl.int32), tl.load(record + 25).to(tl.int32)
    target = index.to(tl.int64) * width + tl.load(offsets + index * parts + part)
    row = logits + tl.load(rules + index).to(tl.int64) * stride
    for start in tl.static_range(0, BLOCK, TILE):
        columns = part * BLOCK + start + tl.arange(0, TILE)
        value = tl.load(row + columns, mask=columns < width, other=float("-inf"))
        key = _key(value.to(tl.float32), SHIFT)
        wanted = ((key >= low) & (key < high) & (columns < width)).to(tl.int32)
        num_wanted = tl.sum(wanted, 0)
        if num_wanted > 0:
            place = target + tl.cumsum(wanted, 0) - 1
            tl.store(values + place, value, mask=wanted > 0)
            tl.store(ids + place, columns, mask=wanted > 0)
        target += num_wanted


@triton.jit
def _above(values, size, highest, inverse, a, b, c, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass and number of the tokens set aside whose keys are at least a, b and c."""
    at_a, at_b, at_c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    num_a, num_b, num_c = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(values + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        key = tl.where(columns < size, _key(value, SHIFT), -2147483648)
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
def _three_cuts(low, high, num_rounds, SHIFT: tl.constexpr):
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
def _pick(is_a, is_b, is_c, at_c, at_b, at_a, otherwise):
    """The entry of the highest cut whose condition is met."""
    return tl.where(is_c, at_c, tl.where(is_b, at_b, tl.where(is_a, at_a, otherwise)))


@triton.jit
def _shrunk(values, ids, size, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Keep of the tokens set aside those with keys in [low, high), in order; how many they are.

    What is written lies before what is read next, and the barriers keep the threads together.
    """
    seen = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=float("-inf"))
        token = tl.load(ids + index, mask=index < size, other=0)
        key = _key(value.to(tl.float32), SHIFT)
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
    """Id of the token set aside that has ``rank`` others of the same key before it."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=float("-inf")).to(tl.float32)
        same = ((_key(value, SHIFT) == key) & (index < size)).to(tl.int32)
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
    """End the search among the tokens set aside: note the mass that a truncation leaves, or the token."""
    index = tl.program_id(0)
    record = records + index * 48
    token = tl.load(record + 3).to(tl.int32)
    if (tl.load(record + 1).to(tl.int32) >> KIND) & 1 == 1:
        inverse = (1.0 / tl.load(rules + 2 * num_rows + index)).to(tl.float32)
        highest = tl.load(record).to(tl.float32)
        low, high, mass_low, mass_high, count_low, count_high, target, size = _noted(record + 24)
        values += index.to(tl.int64) * width
        ids += index.to(tl.int64) * width
        mass_above, count_above = mass_high, count_high  # of tokens that are not among those set aside
        num_rounds = 0
        while high - low > 1:
            a, b, c = _three_cuts(low, high, num_rounds, SHIFT)
            at_a, at_b, at_c, num_a, num_b, num_c = _above(values, size, highest, inverse, a, b, c, SHIFT, BLOCK)
            at_a, at_b, at_c = at_a + mass_above, at_b + mass_above, at_c + mass_above
            num_a, num_b, num_c = num_a + count_above, num_b + count_above, num_c + count_above
            is_a, is_b, is_c = (
                _reaches(at_a, num_a, target, KIND), _reaches(at_b, num_b, target, KIND),
                _reaches(at_c, num_c, target, KIND),
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
        weight = _weight(low, highest, inverse, SHIFT)
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
