"""Low-rank updates of a projection for the tokens of a step, each with its own adapters.

Two kernels: :func:`shrink` multiplies the inputs by the halves A, :func:`expand` multiplies the result by the halves B
and adds it to the projection's own; of a gated part, it also multiplies the result by the next halves A. The halves of
all adapters are stacked along their ranks (``stacks.py``), so that a tile of several adapters is one product for the
tensor cores; a token reads and adds nothing for adapters that it does not use. The addresses are fixed and the sizes
those of the stacks: the kernels can be recorded. For a few tokens the columns of A are split among programs, whose sums
meet in integers (fixed point), so that their order has no effect.

Source: SGMV of Punica (Chen et al., 2023, arXiv:2310.18547) and S-LoRA (Sheng et al., 2023, arXiv:2311.03285), which
gather an adapter's tokens; here all tokens of a tile are multiplied, and those of others are zero.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation

__all__ = ["MAX_PARTS", "MAX_SPLIT", "Stack", "Sums", "expand", "expand_gated", "shrink"]

MAX_PARTS = 3
"""Most modules that one projection joins: queries, keys and values."""

MAX_SPLIT = 128
"""Most tokens for which the columns are split."""

_LARGEST_TILE = 64
"""Most tokens of a program."""

_ONE = tl.constexpr(4294967296.0)

_COLUMNS = 128
"""Most ranks at once in :func:`expand`."""

_SHRINK = (256, 16, 4, 3)
"""Columns at once, most splits, warps, stages."""

_EXPAND = (64, 4)
"""Rows of a program, warps."""


@frozen(eq=False)
class Stack:
    """The halves of all adapters for one projection; zero where an adapter does not change it.

    Attributes:
        a: (num_parts * num_adapters * rank, inputs), part by part and adapter by adapter.
        b: (outputs, num_adapters * rank), adapter by adapter.
        rows: outputs of each part of a joint projection.
        num_adapters: adapters that fit.
        rank: ranks per adapter, a power of two of at least 16.
    """

    a: Tensor
    b: Tensor
    rows: tuple[int, ...]
    num_adapters: int
    rank: int


@triton.jit(do_not_specialize=["num_tokens", "num_adapters"])
def _shrink(
    x, a, scales, low, num_tokens, width, num_adapters, num_low,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    adapter = first // RANK % num_adapters
    scale = tl.load(scales + adapter * num_tokens + token, mask=token < num_tokens, other=0.0)
    is_used = scale != 0.0
    own = tl.cdiv(tl.cdiv(width, BLOCK), num_splits) * BLOCK
    end = tl.where(tl.max(is_used.to(tl.int32), 0) > 0, tl.minimum(split * own + own, width), 0)
    row = first + tl.arange(0, ROWS)
    column = split * own + tl.arange(0, BLOCK)
    at_a = a + row.to(tl.int64)[None, :] * width + column[:, None]
    at_x = x + token.to(tl.int64)[:, None] * width + column[None, :]
    weight = tl.load(at_a, mask=(column < end)[:, None], other=0.0)
    await_previous()
    value = tl.load(at_x, mask=is_used[:, None] & (column < end)[None, :], other=0.0)
    sums = tl.dot(value, weight, input_precision=PRECISION)
    for start in range(BLOCK, own, BLOCK):
        inside = start + column < end
        value = tl.load(at_x + start, mask=is_used[:, None] & inside[None, :], other=0.0)
        weight = tl.load(at_a + start, mask=inside[:, None], other=0.0)
        sums = tl.dot(value, weight, sums, input_precision=PRECISION)
    at_low = low + token.to(tl.int64)[:, None] * num_low + row[None, :]
    both = is_used[:, None] & (row >= 0)[None, :]
    if IS_SPLIT:
        tl.atomic_add(at_low, (sums * scale[:, None] * _ONE).to(tl.int64), mask=both, sem="relaxed")
    else:
        tl.store(at_low, sums * scale[:, None], mask=both)


@triton.jit
def _low(low, token, is_used, adapter, part, start, num_adapters, num_low,
         RANK: tl.constexpr, TOKENS: tl.constexpr, ADAPTERS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """(TOKENS, ADAPTERS * DEPTH) float32, results of :func:`shrink` for some adapters of a part; zero if not used."""
    column = (part * num_adapters + adapter)[:, None] * RANK + start + tl.arange(0, DEPTH)[None, :]
    at_low = low + token.to(tl.int64)[:, None, None] * num_low + column[None, :, :]
    value = tl.load(at_low, mask=is_used[:, :, None], other=0).to(tl.float32)
    if low.dtype.element_ty == tl.int64:
        value *= 1.0 / _ONE
    return tl.reshape(value, [TOKENS, ADAPTERS * DEPTH])


@triton.jit
def _shrink_tile(
    value, at_a, scales, low, token, is_token, is_row, width, num_tokens, num_adapters,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ADAPTERS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of some columns, (TOKENS, ROWS), to the sums of the next projection, which has one part."""
    for first in range(0, num_adapters, ADAPTERS):
        adapter = first + tl.arange(0, ADAPTERS)
        is_any = is_token[:, None] & (adapter < num_adapters)[None, :]
        scale = tl.load(scales + adapter[None, :] * num_tokens + token[:, None], mask=is_any, other=0.0)
        for start in range(0, RANK, DEPTH):
            depth = first * RANK + start + tl.arange(0, ADAPTERS * DEPTH)
            inside = is_row[:, None] & (depth < num_adapters * RANK)[None, :]
            weight = tl.load(at_a + depth.to(tl.int64)[None, :] * width, mask=inside, other=0.0)
            sums = tl.reshape(tl.dot(value, weight, input_precision=PRECISION), [TOKENS, ADAPTERS, DEPTH])
            column = adapter[:, None] * RANK + start + tl.arange(0, DEPTH)[None, :]
            at_low = low + token.to(tl.int64)[:, None, None] * (num_adapters * RANK) + column[None, :, :]
            is_used = (scale != 0.0)[:, :, None] & (column >= 0)[None, :, :]
            tl.atomic_add(at_low, (sums * scale[:, :, None] * _ONE).to(tl.int64), mask=is_used, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "num_adapters"])
def _expand(
    out, low, b, scales, result, next_a, next_low, num_tokens, out_stride, rows0, rows1, rows2, num_parts, num_adapters,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, ADAPTERS: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, SHRINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = b.dtype.element_ty
    tile, token = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    num_low = num_parts * num_adapters * RANK
    if KIND is None:
        tiles0, tiles1 = tl.cdiv(rows0, ROWS), tl.cdiv(rows1, ROWS)
        part = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
        local = (tile - tl.where(part > 0, tiles0, 0) - tl.where(part > 1, tiles1, 0)) * ROWS + tl.arange(0, ROWS)
        is_row = local < tl.where(part == 0, rows0, tl.where(part == 1, rows1, rows2))
        row = local + tl.where(part > 0, rows0, 0) + tl.where(part > 1, rows1, 0)
    else:
        half = (rows0 + rows1) // 2
        part, row = 0, tile * ROWS + tl.arange(0, ROWS)
        is_row = row < half
    at_b = b + row.to(tl.int64)[None, :] * (num_adapters * RANK)
    sums, ups = tl.zeros([TOKENS, ROWS], tl.float32), tl.zeros([TOKENS, ROWS], tl.float32)
    await_previous()  # not in the loop: the compiler begins to load before a loop what its first turn reads
    for first in range(0, num_adapters, ADAPTERS):
        adapter = first + tl.arange(0, ADAPTERS)
        is_any = is_token[:, None] & (adapter < num_adapters)[None, :]
        is_used = tl.load(scales + adapter[None, :] * num_tokens + token[:, None], mask=is_any, other=0.0) != 0.0
        end = tl.where(tl.max(tl.max(is_used.to(tl.int32), 1), 0) > 0, num_adapters * RANK, 0)
        for start in range(0, RANK, DEPTH):
            depth = first * RANK + start + tl.arange(0, ADAPTERS * DEPTH)
            inside = is_row[None, :] & (depth < end)[:, None]
            weight = tl.load(at_b + depth[:, None], mask=inside, other=0.0)
            if KIND is not None:
                at_up = at_b + half.to(tl.int64) * (num_adapters * RANK)
                up_weight = tl.load(at_up + depth[:, None], mask=inside, other=0.0)
            value = _low(
                low, token, is_used, adapter, part, start, num_adapters, num_low, RANK, TOKENS, ADAPTERS, DEPTH
            )  # fmt: skip
            sums = tl.dot(value.to(kind), weight, sums, input_precision=PRECISION)
            if KIND is not None:
                if num_parts > 1:
                    value = _low(
                        low, token, is_used, adapter, part + 1, start, num_adapters, num_low, RANK, TOKENS, ADAPTERS,
                        DEPTH,
                    )  # fmt: skip
                ups = tl.dot(value.to(kind), up_weight, ups, input_precision=PRECISION)
    both = is_token[:, None] & is_row[None, :]
    at_out = out + token.to(tl.int64)[:, None] * out_stride + row[None, :]
    sums += tl.load(at_out, mask=both, other=0.0).to(tl.float32)
    if KIND is None:
        tl.store(at_out, sums.to(out.dtype.element_ty), mask=both)
    else:
        ups += tl.load(at_out + half, mask=both, other=0.0).to(tl.float32)
        active = activate(sums.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        at_result = result + token.to(tl.int64)[:, None] * half + row[None, :]
        final = (active * ups.to(kind).to(tl.float32)).to(kind)
        tl.store(at_result, final, mask=both)
        if SHRINKS:
            _shrink_tile(
                tl.where(both, final, 0.0).to(kind), next_a + row[:, None], scales, next_low, token, is_token, is_row,
                half, num_tokens, num_adapters, RANK, TOKENS, ADAPTERS, DEPTH, PRECISION,
            )  # fmt: skip


class Sums:
    """Zeroed memory for results of :func:`shrink` in one step.

    Args:
        stacks: those that the step reads, each once.
        num_tokens: T.
    """

    def __init__(self, stacks: Collection[Stack], num_tokens: int) -> None:
        size = num_tokens * sum(len(stack.a) for stack in stacks) if num_tokens <= MAX_SPLIT else 0
        device = next(iter(stacks)).a.device
        self._free = torch.zeros(size, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(stacks), dtype=torch.int32, device=device)

    def count(self) -> Tensor:
        """(1,) int32 zero."""
        taken, self._counts = self._counts[:1], self._counts[1:]
        return taken

    def take(self, num_tokens: int, num_low: int) -> Tensor | None:
        """(T, num_low) int64 zeros; None if there are too many tokens to split the columns."""
        size = num_tokens * num_low
        if len(self._free) < size:
            return None
        taken, self._free = self._free[:size], self._free[size:]
        return taken.view(num_tokens, num_low)


def shrink(x: Tensor, stack: Stack, scales: Tensor, sums: Sums) -> Tensor:
    """Multiply inputs by the halves A of their adapters.

    Args:
        x: (T, inputs), contiguous.
        stack: of the projection.
        scales: (num_adapters, T) float32, how much each token uses of each adapter; 0 is not at all.
        sums: memory of the step.

    Returns:
        (T, num_parts * num_adapters * rank), the scaled products: float32, of which only what the tokens use is filled,
        or int64 as multiples of 2 ** -32.
    """
    num_tokens, width = x.shape
    num_low = len(stack.a)
    tokens = _tile(num_tokens)
    rows = min(stack.rank, _LARGEST_TILE)
    block, most, warps, stages = _SHRINK
    block = block // 2 if x.dtype == torch.float32 else block
    low = sums.take(num_tokens, num_low)
    is_split = low is not None
    num_splits = max(1, min(most, width // block)) if is_split else 1
    if low is None:
        low = torch.empty(num_tokens, num_low, dtype=torch.float32, device=x.device)
    _shrink[(num_low // rows, num_splits, triton.cdiv(num_tokens, tokens))](
        x, stack.a, scales, low, num_tokens, width, stack.num_adapters, num_low, stack.rank, tokens, rows, block,
        is_split, _precision(x), num_warps=warps, num_stages=stages, **OVERLAPPING,
    )  # fmt: skip
    return low


def expand(out: Tensor, low: Tensor, stack: Stack, scales: Tensor) -> None:
    """Add the updates to the result of a projection.

    Args:
        out: (T, outputs), whose rows may be apart; changed.
        low: result of :func:`shrink`.
        stack: of the projection.
        scales: as for :func:`shrink`.
    """
    parts = (*stack.rows, 0, 0)[:MAX_PARTS]
    tiles = sum(triton.cdiv(part, _EXPAND[0]) for part in parts)
    _launch_expand(tiles, out, low, stack, scales, out, None, stack, None)


def expand_gated(
    out: Tensor, low: Tensor, stack: Stack, scales: Tensor, activation: Activation, following: Stack | None, sums: Sums
) -> tuple[Tensor, Tensor | None]:
    """Add the updates to a gated part, and multiply the result by the halves A of the projection after it.

    Args:
        out: (T, outputs): the gate, then as much of the other factor.
        low, stack, scales: as for :func:`expand`.
        following: stack of the next projection; None is none.
        sums: as for :func:`shrink`.

    Returns:
        ``activation(gate) * up``, (T, outputs / 2), and what :func:`shrink` returns for it and ``following``, None if
        there are too many tokens to split the columns.
    """
    num_tokens, num_rows = out.shape
    result = out.new_empty(num_tokens, num_rows // 2)
    next_low = None if following is None else sums.take(num_tokens, len(following.a))
    tiles = triton.cdiv(num_rows // 2, _EXPAND[0])
    _launch_expand(tiles, out, low, stack, scales, result, activation, following or stack, next_low)
    return result, next_low


def _launch_expand(
    tiles: int, out: Tensor, low: Tensor, stack: Stack, scales: Tensor, result: Tensor, activation: Activation | None,
    following: Stack, next_low: Tensor | None,
) -> None:  # fmt: skip
    num_tokens, tokens, (rows, warps) = len(out), _tile(len(out)), _EXPAND
    adapters = max(1, min(triton.next_power_of_2(stack.num_adapters), _COLUMNS // stack.rank))
    _expand[(tiles, triton.cdiv(num_tokens, tokens))](
        out, low, stack.b, scales, result, following.a, low if next_low is None else next_low, num_tokens,
        out.stride(0), *(*stack.rows, 0, 0)[:MAX_PARTS], len(stack.rows), stack.num_adapters, stack.rank, tokens, rows,
        adapters, min(stack.rank, _COLUMNS), activation, next_low is not None, _precision(stack.b), num_warps=warps,
        num_stages=1, **OVERLAPPING,
    )  # fmt: skip


def _tile(num_tokens: int) -> int:
    return max(16, min(_LARGEST_TILE, triton.next_power_of_2(num_tokens)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
