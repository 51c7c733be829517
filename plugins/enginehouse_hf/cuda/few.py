"""Products with weights for a few tokens, for the steps of a small batch.

The tensor cores have little to do, and the weights must be read at full bandwidth. They are the left operand, whose
tile is full for any number of tokens. The columns are split among programs so that there are enough of them; the sum of
the splits is left to the kernel that reads the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.joined import (
    MIN_ROWS,
    Update,
    add_columns,
    arguments,
    await_count,
    publish,
    shrink_rows,
)
from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.lora import MAX_COLUMNS, used_columns
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_results, start_next
from enginehouse_hf.cuda.structure import Activation, Linear

__all__ = ["MAX_FEW", "project_few"]

MAX_FEW = 32
"""Most tokens for which this is faster than cuBLAS."""

_MANY_ROWS = 16_384
"""Output rows that need no split of the columns."""

_ROWS = 64
"""Height of a tile of the tensor cores."""


@triton.jit
def _product(
    x, weight, bias, out, b, scales, low, done, program, num_tokens, num_rows, rows0, rows1, num_shrinks, num_adapters,
    num_low, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    LOW_SPLITS: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    OWN: tl.constexpr = WIDTH // SPLITS
    num_tiles = num_rows // ROWS
    first, split = program % num_tiles * ROWS, program // num_tiles
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    if RANK > 0:
        num_columns = num_adapters * RANK
        begin = tl.multiple_of(split * (num_columns // SPLITS), 16)
        at_b = b + rows[:, None] * num_columns + tl.arange(0, COLUMNS)[None, :]
        at_up_b = at_b + num_rows.to(tl.int64) * num_columns
        is_used = used_columns(scales, token, num_tokens, begin, RANK, COLUMNS)
        half = tl.load(at_b + begin, mask=is_used, other=0.0)
        if KIND is not None:
            up_half = tl.load(at_up_b + begin, mask=is_used, other=0.0)
    column = split * OWN + tl.arange(0, BLOCK)
    at_weight = weight + rows[:, None] * WIDTH + column[None, :]
    at_up = at_weight + num_rows.to(tl.int64) * WIDTH
    at_x = x + tl.where(is_token, token, 0)[None, :] * WIDTH + column[:, None]
    sums, ups = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    await_results()
    for start in tl.range(0, OWN, BLOCK, num_stages=STAGES):
        value = tl.load(at_x + start)
        sums = tl.dot(tl.load(at_weight + start), value, sums)
        if KIND is not None:
            ups = tl.dot(tl.load(at_up + start), value, ups)
    start_next()  # not earlier: programs that start while others still read are spread unevenly
    if RANK > 0:
        part = (first >= rows0).to(tl.int32) + (first >= rows0 + rows1).to(tl.int32)
        up_part = (num_rows + first >= rows0).to(tl.int32)
        await_count(done, num_shrinks)
        sums = add_columns(sums, half, low, part, begin, num_tokens, num_columns, num_low, TOKENS, COLUMNS, LOW_SPLITS)
        if KIND is not None:
            ups = add_columns(
                ups, up_half, low, up_part, begin, num_tokens, num_columns, num_low, TOKENS, COLUMNS, LOW_SPLITS
            )
        for more in tl.range(begin + COLUMNS, begin + num_columns // SPLITS, COLUMNS, num_stages=1):
            is_used = used_columns(scales, token, num_tokens, more, RANK, COLUMNS)
            half = tl.load(at_b + more, mask=is_used, other=0.0)
            sums = add_columns(
                sums, half, low, part, more, num_tokens, num_columns, num_low, TOKENS, COLUMNS, LOW_SPLITS
            )
            if KIND is not None:
                half = tl.load(at_up_b + more, mask=is_used, other=0.0)
                ups = add_columns(
                    ups, half, low, up_part, more, num_tokens, num_columns, num_low, TOKENS, COLUMNS, LOW_SPLITS
                )
    if HAS_BIAS:
        sums += tl.where(split == 0, tl.load(bias + rows).to(tl.float32), 0.0)[:, None]
    if KIND is not None:
        active = activate(sums.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        sums = active * ups.to(kind).to(tl.float32)
    at_out = out + (token.to(tl.int64)[None, :] * SPLITS + split) * num_rows + rows[:, None]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _project_few(
    x, weight, bias, out, a, b, scales, low, done, num_tokens, num_rows, rows0, rows1, num_shrinks, num_adapters,
    num_low, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    LOW_ROWS: tl.constexpr, LOW_SPLITS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if RANK == 0:
        _product(
            x, weight, bias, out, b, scales, low, done, program, num_tokens, num_rows, 0, 0, 0, 0, 0, WIDTH, TOKENS,
            ROWS, BLOCK, SPLITS, HAS_BIAS, KIND, STAGES, RANK, COLUMNS, LOW_SPLITS,
        )  # fmt: skip
    elif program < num_shrinks:
        await_results()
        shrink_rows(
            x, a, scales, low, program, num_tokens, num_adapters, num_low, WIDTH, TOKENS, RANK, LOW_ROWS, BLOCK,
            LOW_SPLITS, STAGES,
        )  # fmt: skip
        publish(done)
    else:
        _product(
            x, weight, bias, out, b, scales, low, done, program - num_shrinks, num_tokens, num_rows, rows0, rows1,
            num_shrinks, num_adapters, num_low, WIDTH, TOKENS, ROWS, BLOCK, SPLITS, HAS_BIAS, KIND, STAGES, RANK,
            COLUMNS, LOW_SPLITS,
        )  # fmt: skip


def project_few(
    x: Tensor, part: Linear, activation: Activation | None = None, update: Update | None = None
) -> Tensor | None:
    """Compute ``part(x)`` for up to :data:`MAX_FEW` tokens.

    Args:
        x: (T, width).
        part: (num_rows, width); with ``activation`` the rows of the gate, then as many of the other factor.
        activation: the result is ``activation(gate) * up``, half as many rows.
        update: added to the product.

    Returns:
        (T, num_rows), or half as many if gated; or (T, n, num_rows) float32, whose n rows add up to the result. None if
        the sizes or types do not suit.
    """
    num_tokens, width = x.shape
    num_rows = part.weight.shape[0] // (1 if activation is None else 2)
    tokens = max(8, triton.next_power_of_2(num_tokens))
    splits = 1 if activation is not None or num_rows >= _MANY_ROWS else 4
    block = 128 if activation is None else 64  # measured on an H200
    if num_tokens > MAX_FEW or num_rows % _ROWS or width % (block * splits) or x.dtype == torch.float32:
        return None
    rank = columns = 0
    if update is not None:
        rank, columns = update.stack.rank, min(MAX_COLUMNS, update.stack.num_adapters * update.stack.rank // splits)
        if columns < MIN_ROWS or any(rows % _ROWS for rows in update.stack.rows):
            return None
    shape = (num_tokens, num_rows) if splits == 1 else (num_tokens, splits, num_rows)
    out = torch.empty(shape, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    tensors, numbers, num_shrinks = arguments(update, x, MIN_ROWS, splits)
    _project_few[(num_shrinks + num_rows // _ROWS * splits,)](
        x, part.weight, x if part.bias is None else part.bias, out, *tensors, num_tokens, num_rows, *numbers, width,
        tokens, _ROWS, block, splits, part.bias is not None, activation, 4, rank, columns, MIN_ROWS,
        splits, num_warps=4, **OVERLAPPING,
    )  # fmt: skip
    return out
