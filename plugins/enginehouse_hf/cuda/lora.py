"""Low-rank updates of a projection for the tokens of a step, each with its own adapters.

:func:`shrink` multiplies the inputs by the halves A of all adapters, stacked along their ranks (``stacks.py``). A
kernel multiplies what each token uses of this by the halves B and adds it to the projection's own result; of a gated
part it also computes the activation. The addresses are fixed and the sizes those of the stacks: all can be recorded.
``vector.py`` adds them for one token, ``joined.py`` within the kernels of products for a few.

Source: SGMV of Punica (Chen et al., 2023, arXiv:2310.18547) and S-LoRA (Sheng et al., 2023, arXiv:2311.03285), which
gather an adapter's tokens; here all tokens of a tile are multiplied, and those of others are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation

__all__ = ["MAX_COLUMNS", "MAX_PARTS", "Stack", "expand", "expand_gated", "shrink", "used_columns"]

MAX_PARTS = 3
"""Most modules that one projection joins: queries, keys and values."""

MAX_COLUMNS = 128
"""Most columns of B at once."""

_ROWS = 64
"""Rows of a program that adds updates. Measured on an H200."""


@frozen(eq=False)
class Stack:
    """The halves of all adapters for one projection; zero where an adapter does not change it.

    Attributes:
        a: (num_parts * num_adapters * rank, inputs), part by part and adapter by adapter.
        b: (outputs, num_adapters * rank), adapter by adapter.
        rows: outputs of each part of a joint projection.
        num_adapters: adapters that fit, a power of two.
        rank: ranks per adapter, a power of two of at least 16.
    """

    a: Tensor
    b: Tensor
    rows: tuple[int, ...]
    num_adapters: int
    rank: int


@triton.jit
def used_columns(scales, token, num_tokens, first, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """(1, COLUMNS) bool, columns of B from ``first`` on whose adapter one of some tokens uses."""
    at_scale = scales + first // RANK * num_tokens + token
    if COLUMNS <= RANK:
        scale = tl.load(at_scale, mask=token < num_tokens, other=0.0)
        found = tl.zeros([1, COLUMNS], tl.int32) + tl.max((scale != 0.0).to(tl.int32), 0)
    else:
        ADAPTERS: tl.constexpr = COLUMNS // RANK
        at_scales = at_scale[:, None] + tl.arange(0, ADAPTERS)[None, :] * num_tokens
        scale = tl.load(at_scales, mask=(token < num_tokens)[:, None], other=0.0)
        is_used = tl.max((scale != 0.0).to(tl.int32), 0)
        found = tl.reshape(tl.broadcast_to(is_used[:, None], [ADAPTERS, RANK]), [1, COLUMNS])
    return tl.max_constancy(found, [1, 16]) > 0  # the smallest rank; lets the compiler load several columns at once


@triton.jit(do_not_specialize=["num_tokens", "num_adapters"])
def _scale(low, scales, num_tokens, num_low, num_adapters, RANK: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_low
    scale = tl.load(scales + column // RANK % num_adapters * num_tokens + token, mask=inside, other=0.0)
    at_low = low + token.to(tl.int64) * num_low + column
    value = tl.load(at_low, mask=scale != 0.0, other=0.0).to(tl.float32) * scale
    tl.store(at_low, value.to(low.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "num_adapters"])
def _expand(
    out, low, b, scales, result, num_tokens, out_stride, rows0, rows1, rows2, num_parts, num_adapters,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = b.dtype.element_ty
    tile, token = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    num_columns = num_adapters * RANK
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
    at_out = out + token.to(tl.int64)[:, None] * out_stride + row[None, :]
    at_low = low + token.to(tl.int64)[:, None] * (num_parts * num_columns) + part * num_columns
    at_b = b + row.to(tl.int64)[None, :] * num_columns
    both = is_token & is_row[None, :]
    await_previous()  # not in the loop: the compiler moves the loads of its first turn before it
    before = tl.load(at_out, mask=both, other=0.0)
    if KIND is not None:
        up_before = tl.load(at_out + half, mask=both, other=0.0)
    sums = before.to(tl.float32) + _update(
        at_low, at_b, scales, token, is_row, num_tokens, num_columns, RANK, TOKENS, ROWS, COLUMNS, IS_WHOLE, PRECISION
    )
    if KIND is None:
        tl.store(at_out, sums.to(out.dtype.element_ty), mask=both)
    else:
        active = activate(sums.to(kind).to(tl.float32), KIND).to(kind)
        ups = up_before.to(tl.float32) + _update(
            at_low + tl.where(num_parts > 1, num_columns, 0), at_b + half.to(tl.int64) * num_columns, scales, token,
            is_row, num_tokens, num_columns, RANK, TOKENS, ROWS, COLUMNS, IS_WHOLE, PRECISION,
        )  # fmt: skip
        at_result = result + token.to(tl.int64)[:, None] * half + row[None, :]
        tl.store(at_result, (active.to(tl.float32) * ups.to(kind).to(tl.float32)).to(kind), mask=both)


@triton.jit
def _update(
    at_low, at_b, scales, token, is_row, num_tokens, num_columns,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(TOKENS, ROWS) float32, results for A times B; if B is several blocks, unused adapters are not read."""
    column = tl.arange(0, COLUMNS)
    at_low, at_b = at_low + column[None, :], at_b + column[:, None]
    is_token, inside = (token < num_tokens)[:, None], is_row[None, :]
    if IS_WHOLE:
        value = tl.load(at_low, mask=is_token, other=0.0)
        return tl.dot(value, tl.load(at_b, mask=inside, other=0.0), input_precision=PRECISION)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, num_columns, COLUMNS):
        is_used = tl.trans(used_columns(scales, token, num_tokens, first, RANK, COLUMNS))
        value = tl.load(at_low + first, mask=is_token, other=0.0)
        weight = tl.load(at_b + first, mask=is_used & inside, other=0.0)
        sums = tl.dot(value, weight, sums, input_precision=PRECISION)
    return sums


def shrink(x: Tensor, stack: Stack, scales: Tensor) -> Tensor:
    """Multiply inputs by the halves A of their adapters.

    Args:
        x: (T, inputs).
        stack: of the projection.
        scales: (num_adapters, T) float32, how much each token uses of each adapter; 0 is not at all.

    Returns:
        (T, num_parts * num_adapters * rank), scaled; zero where a token does not use an adapter.
    """
    low = linear(x, stack.a)
    num_tokens, num_low = low.shape
    block = min(1024, triton.next_power_of_2(num_low))
    _scale[(num_tokens, triton.cdiv(num_low, block))](
        low, scales, num_tokens, num_low, stack.num_adapters, stack.rank, block, num_warps=4, **OVERLAPPING
    )
    return low


def expand(out: Tensor, low: Tensor, stack: Stack, scales: Tensor) -> None:
    """Add the updates to the result of a projection.

    Args:
        out: (T, outputs), whose rows may be apart; changed.
        low: result of :func:`shrink`.
        stack, scales: as for it.
    """
    tiles = sum(triton.cdiv(part, _ROWS) for part in stack.rows)
    _launch(tiles, out, low, stack, scales, out, None)


def expand_gated(out: Tensor, low: Tensor, stack: Stack, scales: Tensor, activation: Activation) -> Tensor:
    """Add the updates to a gated part.

    Args:
        out: (T, outputs): the gate, then as much of the other factor.
        low, stack, scales: as for :func:`expand`.

    Returns:
        ``activation(gate) * up``, (T, outputs / 2).
    """
    num_tokens, num_rows = out.shape
    result = out.new_empty(num_tokens, num_rows // 2)
    _launch(triton.cdiv(num_rows // 2, _ROWS), out, low, stack, scales, result, activation)
    return result


def _launch(
    tiles: int, out: Tensor, low: Tensor, stack: Stack, scales: Tensor, result: Tensor, activation: Activation | None
) -> None:
    num_tokens, num_columns = len(out), stack.num_adapters * stack.rank
    is_wide = num_tokens > 64 and activation is not None and stack.b.dtype != torch.float32  # measured on an H200
    tokens = 128 if is_wide else min(64, max(16, triton.next_power_of_2(num_tokens)))
    columns = min(MAX_COLUMNS, num_columns)
    _expand[(tiles, triton.cdiv(num_tokens, tokens))](
        out, low, stack.b, scales, result, num_tokens, out.stride(0), *(*stack.rows, 0, 0)[:MAX_PARTS], len(stack.rows),
        stack.num_adapters, stack.rank, tokens, _ROWS, columns, num_columns == columns, activation,
        "ieee" if stack.b.dtype == torch.float32 else "tf32", num_warps=8 if is_wide else 4, num_stages=1,
        **OVERLAPPING,
    )  # fmt: skip
