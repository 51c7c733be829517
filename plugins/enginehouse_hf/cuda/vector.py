"""Matrix-vector products for the step of a single sequence: the weights are read once, at full memory bandwidth.

With one token cuBLAS leaves a fifth of the bandwidth unused. Here the first weights are read while the previous kernel
ends, and the product of a gated part with its activation is one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.joined import Update, arguments, await_count, publish
from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.lora import MAX_COLUMNS
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation, Linear

__all__ = ["project"]


@triton.jit
def _product(
    x, weight, bias, out, b, scales, low, done, program, num_rows, rows0, rows1, num_shrinks, num_adapters,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    if RANK > 0:
        num_columns = num_adapters * RANK
        depth = tl.arange(0, COLUMNS)
        at_b = b + rows.to(tl.int64)[:, None] * num_columns + depth[None, :]
        at_up_b = at_b + num_rows.to(tl.int64) * num_columns
        is_used = is_row[:, None] & (tl.load(scales + depth // RANK) != 0.0)[None, :]
        half = tl.load(at_b, mask=is_used, other=0.0)
        if KIND is not None:
            up_half = tl.load(at_up_b, mask=is_used, other=0.0)
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
    result, up_result = tl.sum(sums, 1), tl.sum(ups, 1)
    if RANK > 0:
        index = (rows >= rows0).to(tl.int32) + (rows >= rows0 + rows1).to(tl.int32)
        at_low = low + index[:, None] * num_columns + depth[None, :]
        await_count(done, num_shrinks)
        result += _more(at_low, half, is_used)
        if KIND is not None:
            up_result += _more(at_low + num_columns, up_half, is_used)
        for first in tl.range(COLUMNS, num_columns, COLUMNS, num_stages=1):
            is_used = is_row[:, None] & (tl.load(scales + (first + depth) // RANK) != 0.0)[None, :]
            half = tl.load(at_b + first, mask=is_used, other=0.0)
            result += _more(at_low + first, half, is_used)
            if KIND is not None:
                half = tl.load(at_up_b + first, mask=is_used, other=0.0)
                up_result += _more(at_low + num_columns + first, half, is_used)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if KIND is not None:
        active = activate(result.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        result = active * up_result.to(kind).to(tl.float32)
    tl.store(out + rows, result.to(kind), mask=is_row)


@triton.jit
def _more(at_low, half, is_used):
    """(ROWS,) float32, some columns of B times their results."""
    return tl.sum(half.to(tl.float32) * tl.load(at_low, mask=is_used, other=0.0).to(tl.float32), 1)


@triton.jit
def _shrink(x, a, scales, low, first, num_adapters,
            WIDTH: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """As ``shrink_rows`` of ``joined.py``, for one token; nothing if it does not use the adapter."""
    scale = tl.load(scales + first // RANK % num_adapters)
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at_row = a + rows.to(tl.int64)[:, None] * WIDTH
    await_previous()
    if scale != 0.0:
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            inside = start + columns < WIDTH
            part = tl.load(at_row + start + columns[None, :], mask=inside[None, :], other=0.0)
            value = tl.load(x + start + columns, mask=inside, other=0.0)
            sums += part.to(tl.float32) * value.to(tl.float32)[None, :]
        tl.store(low + rows, (tl.sum(sums, 1) * scale).to(low.dtype.element_ty))


@triton.jit
def _project(
    x, weight, bias, out, a, b, scales, low, done, num_rows, rows0, rows1, num_shrinks, num_adapters, num_low,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if RANK == 0:
        _product(
            x, weight, bias, out, b, scales, low, done, program, num_rows, 0, 0, 0, 0, WIDTH, ROWS, BLOCK, HAS_BIAS,
            KIND, RANK, COLUMNS,
        )  # fmt: skip
    elif program < num_shrinks:
        _shrink(x, a, scales, low, program * ROWS, num_adapters, WIDTH, RANK, ROWS, BLOCK)
        publish(done)
    else:
        _product(
            x, weight, bias, out, b, scales, low, done, program - num_shrinks, num_rows, rows0, rows1, num_shrinks,
            num_adapters, WIDTH, ROWS, BLOCK, HAS_BIAS, KIND, RANK, COLUMNS,
        )  # fmt: skip


def project(x: Tensor, part: Linear, activation: Activation | None = None, update: Update | None = None) -> Tensor:
    """Compute ``part(x)`` for one token.

    Args:
        x: (1, width).
        part: (num_rows, width); with ``activation`` the rows of the gate, then as many of the other factor.
        activation: the result is ``activation(gate) * up``, half as many rows.
        update: added to the product.

    Returns:
        (1, num_rows), half as many if gated.
    """
    num_rows, width = part.weight.shape
    num_rows = num_rows // 2 if activation is not None else num_rows
    out = x.new_empty(1, num_rows)
    # Measured on an H200: what keeps most bytes on their way without idle lanes.
    rows, block, warps = (2, 512, 2) if activation is not None else (2, 1024, 4) if width < 4096 else (2, 2048, 4)
    stack = None if update is None else update.stack
    rank, num_columns = (0, 0) if stack is None else (stack.rank, stack.num_adapters * stack.rank)
    tensors, numbers, num_shrinks = arguments(update, x, rows, 1)
    _project[(num_shrinks + triton.cdiv(num_rows, rows),)](
        x, part.weight, x if part.bias is None else part.bias, out, *tensors, num_rows, *numbers, width, rows,
        min(block, triton.next_power_of_2(width)), part.bias is not None, activation, rank,
        min(MAX_COLUMNS, num_columns), num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    return out
