"""Mixtures of experts on the device: routing, and products with the weights of the chosen experts only.

One token: matrix-vector products over all of its experts at once. Many: its pairs of token and expert are sorted by
expert, and each expert multiplies its tokens, so that its weights are read once. Nothing is read on the host and every
size is that of the largest case, so that steps can be recorded; programs without work end at once. Sums are in a fixed
order, so that the same tokens give the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.layers import activate, gated
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Experts, Linear
from enginehouse_hf.cuda.vector import project

__all__ = ["run_experts"]


@triton.jit
def _choose(
    logits, ids, weights, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NORMALISES: tl.constexpr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Ids and weights of the experts of one token, the most probable first; of equal ones the lower."""
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOSEN)
    inside = expert < NUM_EXPERTS
    left = tl.load(logits + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    chance = tl.exp(left - tl.max(left, 0))
    total = tl.sum(chance, 0)
    chosen_ids = tl.zeros([CHOSEN], tl.int32)
    chosen = tl.zeros([CHOSEN], tl.float32)
    for index in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(left, 0)
        is_best = expert == best
        chosen_ids = tl.where(choice == index, best, chosen_ids)
        chosen = tl.where(choice == index, tl.sum(tl.where(is_best, chance, 0.0), 0), chosen)
        left = tl.where(is_best, float("-inf"), left)
    if NORMALISES:
        total = tl.sum(chosen, 0)
    is_choice = choice < NUM_CHOSEN
    tl.store(ids + token * NUM_CHOSEN + choice, chosen_ids, mask=is_choice)
    tl.store(weights + token * NUM_CHOSEN + choice, chosen / total, mask=is_choice)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(ids, order, begins, num_pairs, BLOCK: tl.constexpr):
    """Write the pairs of one expert, ascending, after those of all lower experts; and where they begin and end."""
    await_previous()
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    place = expert * 0
    for start in range(0, num_pairs, BLOCK):
        of = tl.load(ids + start + index, mask=start + index < num_pairs, other=1 << 30)
        place += tl.sum((of < expert).to(tl.int32), 0)
    tl.store(begins + expert, place)
    for start in range(0, num_pairs, BLOCK):
        of = tl.load(ids + start + index, mask=start + index < num_pairs, other=1 << 30)
        is_own = (of == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, start + index, mask=is_own != 0)
        place += tl.sum(is_own, 0)
    tl.store(begins + expert + 1, place)  # the same number that the next expert writes


@triton.jit
def _gate_up(
    x, weight, order, begins, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    expert = tl.program_id(1)
    begin, end = tl.load(begins + expert), tl.load(begins + expert + 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_gate = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + rows[None, :] * HIDDEN
    at_up = at_gate + WIDTH * HIDDEN
    kind = x.dtype.element_ty
    for start in range(begin + tl.program_id(2) * PAIRS, end, PAIRS * tl.num_programs(2)):
        pair = start + tl.arange(0, PAIRS)
        is_pair = pair < end
        token = tl.load(order + pair, mask=is_pair, other=0).to(tl.int64) // NUM_CHOSEN
        gate = tl.zeros([PAIRS, ROWS], tl.float32)
        up = tl.zeros([PAIRS, ROWS], tl.float32)
        for first in range(0, HIDDEN, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(x + token[:, None] * HIDDEN + column[None, :], mask=is_pair[:, None], other=0.0)
            gate = tl.dot(value, tl.load(at_gate + column[:, None]), gate, input_precision=PRECISION)
            up = tl.dot(value, tl.load(at_up + column[:, None]), up, input_precision=PRECISION)
        active = activate(gate.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        result = (active * up.to(kind).to(tl.float32)).to(kind)
        tl.store(out + pair.to(tl.int64)[:, None] * WIDTH + rows[None, :], result, mask=is_pair[:, None])


@triton.jit
def _down(
    x, weight, order, begins, weights, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_PARTS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    expert = tl.program_id(1)
    begin, end = tl.load(begins + expert), tl.load(begins + expert + 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_weight = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + rows[None, :] * WIDTH
    for start in range(begin + tl.program_id(2) * PAIRS, end, PAIRS * tl.num_programs(2)):
        place = start + tl.arange(0, PAIRS)
        is_pair = place < end
        pair = tl.load(order + place, mask=is_pair, other=0).to(tl.int64)
        share = tl.load(weights + pair, mask=is_pair, other=0.0)
        sums = tl.zeros([PAIRS, ROWS], tl.float32)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            at_value = x + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
            value = tl.load(at_value, mask=is_pair[:, None], other=0.0)
            sums = tl.dot(value, tl.load(at_weight + column[:, None]), sums, input_precision=PRECISION)
        row = pair // NUM_CHOSEN * NUM_PARTS + pair % NUM_CHOSEN
        at_out = out + row[:, None] * HIDDEN + rows[None, :]
        tl.store(at_out, (sums * share[:, None]).to(out.dtype.element_ty), mask=is_pair[:, None])


@triton.jit
def _gate_up_single(
    x, weight, ids, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    await_previous()
    choice = tl.program_id(1)
    expert = tl.load(ids + choice).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kind = x.dtype.element_ty
    at_gate = weight + expert * (2 * WIDTH * HIDDEN) + rows[:, None] * HIDDEN
    gates = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, HIDDEN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < HIDDEN)[None, :]
        gate = tl.load(at_gate + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        up = tl.load(at_gate + WIDTH * HIDDEN + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * value
        ups += up.to(tl.float32) * value
    active = activate(tl.sum(gates, 1).to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
    result = active * tl.sum(ups, 1).to(kind).to(tl.float32)
    tl.store(out + choice * WIDTH + rows, result.to(kind))


@triton.jit
def _down_single(
    x, weight, ids, weights, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.arange(0, CHOSEN)
    is_choice = choice < NUM_CHOSEN
    expert = tl.load(ids + choice, mask=is_choice, other=0).to(tl.int64)
    share = tl.load(weights + choice, mask=is_choice, other=0.0)
    at_weight = weight + (expert * (HIDDEN * WIDTH))[None, :, None] + (rows * WIDTH)[:, None, None]
    sums = tl.zeros([ROWS, CHOSEN, BLOCK], tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = is_choice[:, None] & (column < WIDTH)[None, :]
        value = tl.load(x + choice[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        part = tl.load(
            at_weight + column[None, None, :], mask=inside[None, :, :], other=0.0, eviction_policy="evict_first"
        )
        sums += part.to(tl.float32) * (value * share[:, None])[None, :, :]
    tl.store(out + rows, tl.sum(tl.sum(sums, 2), 1).to(out.dtype.element_ty))


def _divisor(size: int, largest: int) -> int:
    """Largest power of two up to ``largest`` that divides ``size``."""
    return min(largest, size & -size)


def _route(logits: Tensor, part: Experts) -> tuple[Tensor, Tensor]:
    """Ids, int32, and weights, float32, of the experts of each token; both (T, num_chosen)."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, part.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, part.num_chosen, dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(num_experts), triton.next_power_of_2(part.num_chosen)
    _choose[(num_tokens,)](
        logits, ids, weights, num_experts, part.num_chosen, part.normalises, *padded, num_warps=1, **OVERLAPPING
    )
    return ids, weights


def run_experts(x: Tensor, part: Experts) -> Tensor:
    """Run the experts of each token.

    Args:
        x: (T, hidden_size).

    Returns:
        (T, n, hidden_size), whose n rows add up to the result.
    """
    return _run_single(x, part) if len(x) == 1 else _run_many(x, part)


def _run_many(x: Tensor, part: Experts) -> Tensor:
    num_tokens, hidden = x.shape
    num_experts, _, width = part.down.shape
    num_chosen, num_pairs = part.num_chosen, num_tokens * part.num_chosen
    num_parts = num_chosen + (part.shared is not None)
    ids, weights = _route(linear(x, part.router), part)
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    begins = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    block = min(1024, max(64, triton.next_power_of_2(num_pairs)))
    _sort[(num_experts,)](ids, order, begins, num_pairs, block, **OVERLAPPING)
    between, out = x.new_empty(num_pairs, width), x.new_empty(num_tokens, num_parts, hidden)
    tiles = _tiles(num_pairs // num_experts, x.dtype)
    splits = max(1, num_pairs // num_experts // tiles.pairs)
    rows, block = _divisor(width, tiles.gate_rows), _divisor(hidden, tiles.block)
    _gate_up[(width // rows, num_experts, splits)](
        x, part.gate_up, order, begins, between, hidden, width, num_chosen, tiles.pairs, rows, block, part.activation,
        tiles.precision, **tiles.launch,
    )  # fmt: skip
    rows, block = _divisor(hidden, tiles.down_rows), _divisor(width, tiles.block)
    _down[(hidden // rows, num_experts, splits)](
        between, part.down, order, begins, weights, out, hidden, width, num_chosen, num_parts, tiles.pairs, rows,
        block, tiles.precision, **tiles.launch,
    )  # fmt: skip
    if part.shared is not None:
        out[:, -1] = _run_shared(x, part)
    return out


@frozen
class _Tiles:
    """Sizes of the products: pairs at once, output rows of both weights, and columns per turn."""

    pairs: int
    gate_rows: int
    down_rows: int
    block: int
    precision: str
    launch: dict[str, Any]


def _tiles(pairs_per_expert: int, dtype: torch.dtype) -> _Tiles:
    """Measured on an H200. Few pairs: as small as tensor cores allow, with many bytes of weights on their way."""
    if dtype == torch.float32:
        return _Tiles(16, 32, 64, 64, "ieee", OVERLAPPING | {"num_warps": 4, "num_stages": 2})
    if pairs_per_expert <= 16:
        return _Tiles(16, 32, 64, 128, "tf32", OVERLAPPING | {"num_warps": 4, "num_stages": 3})
    if pairs_per_expert <= 64:
        return _Tiles(64, 64, 64, 64, "tf32", OVERLAPPING | {"num_warps": 4, "num_stages": 4})
    return _Tiles(128, 64, 64, 64, "tf32", OVERLAPPING | {"num_warps": 8, "num_stages": 3})


def _run_single(x: Tensor, part: Experts) -> Tensor:
    _, hidden, width = part.down.shape
    ids, weights = _route(project(x, Linear(part.router)), part)
    num_parts = 1 + (part.shared is not None)
    between, out = x.new_empty(part.num_chosen, width), x.new_empty(1, num_parts, hidden)
    rows, block = 2, min(2048, triton.next_power_of_2(hidden))
    _gate_up_single[(width // rows, part.num_chosen)](
        x, part.gate_up, ids, between, hidden, width, rows, block, part.activation, num_warps=4, **OVERLAPPING
    )
    chosen, rows, block = triton.next_power_of_2(part.num_chosen), 4, _divisor(width, 128)
    _down_single[(hidden // rows,)](
        between, part.down, ids, weights, out, hidden, width, part.num_chosen, chosen, rows, block, num_warps=8,
        **OVERLAPPING,
    )  # fmt: skip
    if part.shared is not None:
        out[:, -1] = _run_shared(x, part)
    return out


def _run_shared(x: Tensor, part: Experts) -> Tensor:
    shared = part.shared
    assert shared is not None
    result = linear(gated(linear(x, shared.gate_up.weight), shared.activation), shared.down.weight, shared.down.bias)
    return result if part.shared_gate is None else result * torch.sigmoid(linear(x, part.shared_gate))
