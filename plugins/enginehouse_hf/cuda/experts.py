"""Mixtures of experts on the device: routing, and products with the weights of the chosen experts only.

One token: products over all of its experts at once. Many: its pairs of token and expert are sorted by expert, and each
expert multiplies its tokens, so that its weights are read once (``grouped.py``). Nothing is read on the host and every
size is that of the largest case, so that steps can be recorded; programs without work end at once. Sums are in a fixed
order, so that the same tokens give the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.grouped import Pairs, multiply
from enginehouse_hf.cuda.layers import gated
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.packed import project_packed
from enginehouse_hf.cuda.structure import Experts, Gated, Projection
from enginehouse_hf.cuda.vector import project
from enginehouse_hf.packed import Packed

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


def _route(logits: Tensor, part: Experts) -> Pairs:
    """Choose the experts of each token, and sort the pairs by expert, those of one in the order of the tokens."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, part.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, part.num_chosen, dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(num_experts), triton.next_power_of_2(part.num_chosen)
    _choose[(num_tokens,)](
        logits, ids, weights, num_experts, part.num_chosen, part.normalises, *padded, num_warps=1, **OVERLAPPING
    )
    if num_tokens == 1:
        return Pairs(ids, weights, None, None)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=logits.device)
    begins = torch.empty(num_experts + 1, dtype=torch.int32, device=logits.device)
    block = min(1024, max(64, triton.next_power_of_2(ids.numel())))
    _sort[(num_experts,)](ids, order, begins, ids.numel(), block, **OVERLAPPING)
    return Pairs(ids, weights, order, begins)


def run_experts(x: Tensor, part: Experts) -> Tensor:
    """Run the experts of each token.

    Args:
        x: (T, hidden_size).

    Returns:
        (T, n, hidden_size), whose n rows add up to the result.
    """
    num_tokens, hidden_size = x.shape
    num_experts = len(part.router.weight)
    pairs = _route(
        project(x, part.router) if num_tokens == 1 else linear(x, part.router.weight, part.router.bias), part
    )
    between = x.new_empty(num_tokens * part.num_chosen, _num_rows(part.gate_up) // (2 * num_experts))
    out = x.new_empty(num_tokens, part.num_chosen + (part.shared is not None), hidden_size)
    multiply(x, part.gate_up, pairs, num_experts, part.activation, between, alternates=part.alternates)
    multiply(between, part.down, pairs, num_experts, None, out)
    if part.shared is not None:
        out[:, -1] = _run_shared(x, part.shared, part.shared_gate)
    return out


def _run_shared(x: Tensor, shared: Gated, gate: Tensor | None) -> Tensor:
    result = _linear(gated(_linear(x, shared.gate_up), shared.activation), shared.down)
    return result if gate is None else result * torch.sigmoid(linear(x, gate))


def _linear(x: Tensor, part: Projection) -> Tensor:
    return project_packed(x, part) if isinstance(part, Packed) else linear(x, part.weight, part.bias)


def _num_rows(part: Projection) -> int:
    return part.num_rows if isinstance(part, Packed) else len(part.weight)
