"""Matrix-vector products for the step of a single sequence: the weights are read once, at full memory bandwidth.

With one token cuBLAS leaves a fifth of the bandwidth unused. Here the first weights are read while the previous kernel
ends, and the product of a gated part with its activation is one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.joined import Update
from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation, Linear

__all__ = ["project"]


@triton.jit
def _product(
    x, weight, bias, out, program, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    at_row = weight + rows.to(tl.int64)[:, None] * WIDTH
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        inside = start + columns < WIDTH
        both = is_row[:, None] & inside[None, :]
        part = tl.load(at_row + start + columns[None, :], mask=both, other=0.0, eviction_policy="evict_first")
        if KIND is not None:
            at_up = at_row + num_rows.to(tl.int64) * WIDTH + start + columns[None, :]
            up_part = tl.load(at_up, mask=both, other=0.0, eviction_policy="evict_first")
        if start == 0:
            await_previous()
        value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        sums += part.to(tl.float32) * value[None, :]
        if KIND is not None:
            ups += up_part.to(tl.float32) * value[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if KIND is not None:
        active = activate(result.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        result = active * tl.sum(ups, 1).to(kind).to(tl.float32)
    tl.store(out + rows, result.to(kind), mask=is_row)


@triton.jit
def _project(
    x, weight, bias, out, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    _product(x, weight, bias, out, tl.program_id(0), num_rows, WIDTH, ROWS, BLOCK, HAS_BIAS, KIND)


@triton.jit
def _project_and_shrink(
    x, weight, bias, out, a, scales, low, num_rows, num_shrinks, num_adapters,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """The product, and in the first programs ``scale * (a @ x)``; nothing where the token does not use the adapter."""
    program = tl.program_id(0)
    if program >= num_shrinks:
        _product(x, weight, bias, out, program - num_shrinks, num_rows, WIDTH, ROWS, BLOCK, HAS_BIAS, None)
    else:
        scale = tl.load(scales + program * ROWS // RANK % num_adapters)
        rows, columns = program * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        at_row = a + rows.to(tl.int64)[:, None] * WIDTH
        await_previous()
        if scale != 0.0:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in tl.static_range(0, WIDTH, BLOCK):
                inside = start + columns < WIDTH
                part = tl.load(at_row + start + columns[None, :], mask=inside[None, :], other=0.0)
                value = tl.load(x + start + columns, mask=inside, other=0.0)
                sums += part.to(tl.float32) * value.to(tl.float32)[None, :]
            tl.store(low + rows, tl.sum(sums, 1) * scale)


@triton.jit
def _add_update(
    out, low, b, scales, result, num_rows, rows0, rows1,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add B times ``low`` of each adapter that the token uses; B of the first one is read before the wait."""
    kind: tl.constexpr = out.dtype.element_ty
    num_columns: tl.constexpr = ADAPTERS * RANK
    row, column, adapter = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, ADAPTERS)
    is_row = row < num_rows
    is_used = tl.load(scales + adapter) != 0.0
    first = tl.min(tl.where(is_used, adapter, ADAPTERS), 0)
    after = tl.max(tl.where(is_used, adapter + 1, 0), 0)
    inside = is_row[:, None] & (first < ADAPTERS)
    at_b = b + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    at_up_b = at_b + num_rows.to(tl.int64) * num_columns
    half = tl.load(at_b + first * RANK, mask=inside, other=0.0)
    if KIND is not None:
        up_half = tl.load(at_up_b + first * RANK, mask=inside, other=0.0)
    part = (row >= rows0).to(tl.int32) + (row >= rows0 + rows1).to(tl.int32)
    at_low = low + part[:, None] * num_columns + column[None, :]
    # The other factor's own A, unless one module has both.
    at_up_low = low + tl.where(num_rows + row < rows0, 0, num_columns)[:, None] + column[None, :]
    await_previous()
    sums = tl.load(out + row, mask=is_row, other=0.0).to(tl.float32) + _times(half, at_low + first * RANK, inside)
    if KIND is not None:
        ups = tl.load(out + num_rows + row, mask=is_row, other=0.0).to(tl.float32)
        ups += _times(up_half, at_up_low + first * RANK, inside)
    for other in range(first + 1, after):
        if tl.load(scales + other) != 0.0:
            half = tl.load(at_b + other * RANK, mask=is_row[:, None], other=0.0)
            sums += _times(half, at_low + other * RANK, is_row[:, None])
            if KIND is not None:
                half = tl.load(at_up_b + other * RANK, mask=is_row[:, None], other=0.0)
                ups += _times(half, at_up_low + other * RANK, is_row[:, None])
    if KIND is not None:
        active = activate(sums.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        sums = active * ups.to(kind).to(tl.float32)
    tl.store(result + row, sums.to(kind), mask=is_row)


@triton.jit
def _times(half, at_low, inside):
    """(ROWS,) float32, some columns of B times their results."""
    return tl.sum(half.to(tl.float32) * tl.load(at_low, mask=inside, other=0.0), 1)


_ADD = (128, 4)
"""Rows and warps of a program that adds B. Measured on an H200."""


def project(x: Tensor, part: Linear, activation: Activation | None = None, update: Update | None = None) -> Tensor:
    """Compute ``part(x)`` for one token.

    Args:
        x: (1, width).
        part: (num_rows, width); with ``activation`` the rows of the gate, then as many of the other factor.
        activation: the result is ``activation(gate) * up``, half as many rows.
        update: added to the product, before the activation. A second kernel multiplies by B: one that waited for the
            products with A was slower on an H200.

    Returns:
        (1, num_rows), half as many if gated.
    """
    num_rows, width = part.weight.shape
    num_results = num_rows // 2 if activation is not None else num_rows
    result = x.new_empty(1, num_results)
    # Measured on an H200: what keeps most bytes on their way without idle lanes.
    rows, block, warps = (2, 512, 2) if activation is not None else (2, 1024, 4) if width < 4096 else (2, 2048, 4)
    bias = x if part.bias is None else part.bias
    sizes = width, rows, min(block, triton.next_power_of_2(width)), part.bias is not None
    if update is None:
        _project[(triton.cdiv(num_results, rows),)](
            x, part.weight, bias, result, num_results, *sizes, activation, num_warps=warps, **OVERLAPPING
        )
        return result
    stack = update.stack
    num_low, (rows0, rows1) = len(stack.a), (*stack.rows, 0)[:2]
    low = torch.empty(num_low, dtype=torch.float32, device=x.device)
    out = result if activation is None else x.new_empty(1, num_rows)
    _project_and_shrink[(num_low // rows + triton.cdiv(num_rows, rows),)](
        x, part.weight, bias, out, stack.a, update.scales, low, num_rows, num_low // rows, stack.num_adapters,
        *sizes, stack.rank, num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    _add_update[(triton.cdiv(num_results, _ADD[0]),)](
        out, low, stack.b, update.scales, result, num_results, rows0, rows1,
        stack.num_adapters, stack.rank, _ADD[0], activation, num_warps=_ADD[1], **OVERLAPPING,
    )  # fmt: skip
    return result
