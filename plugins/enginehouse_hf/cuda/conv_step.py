"""One token of a gated short convolution per sequence, in Triton, over pools of states.

Called by ``recurrent_parts.py``. Reads a row of the pool and writes another one.

Source: the short convolution of LFM2 (Liquid AI, 2025), with the rounding of transformers' module.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous

__all__ = ["conv_step"]


@triton.jit
def _conv_step(
    projected, pool, sources, targets, weight, bias, out, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    kind: tl.constexpr = projected.dtype.element_ty
    source = tl.load(sources + sequence).to(tl.int64)
    row = projected + sequence * 3 * WIDTH + channel
    before = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(row + WIDTH, mask=inside, other=0.0).to(tl.float32)
    new = (before * tl.load(row + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)).to(kind)
    at_source = pool + (source * WIDTH + channel) * SIZE
    at_target = pool + (tl.load(targets + sequence).to(tl.int64) * WIDTH + channel) * SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(SIZE):
        value = new
        if place < SIZE - 1:
            value = tl.load(at_source + place + 1, mask=inside, other=0.0)
        factor = tl.load(weight + channel * SIZE + place, mask=inside, other=0.0).to(tl.float32)
        total += factor * value.to(tl.float32)
        tl.store(at_target + place, value, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    result = after * total.to(kind).to(tl.float32)
    tl.store(out + sequence * WIDTH + channel, result.to(kind), mask=inside)


def conv_step(
    projected: Tensor, pool: Tensor, sources: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Append one token to each sequence.

    Args:
        projected: (N, 3 * width): factors before the convolution, factors after it, and its inputs.
        pool: (num_rows, width, kernel size), the last inputs of the convolution; changed.
        sources, targets: (N,) int32 or int64, rows that are read, and other rows, which are written.
        weight: (width, kernel size).
        bias: (width,).

    Returns:
        (N, width), input of the output projection.
    """
    width, size = weight.shape
    out = projected.new_empty(len(projected), width)
    block = min(256, triton.next_power_of_2(width))
    _conv_step[(len(projected), triton.cdiv(width, block))](
        projected, pool, sources, targets, weight, weight if bias is None else bias, out, width, size, bias is not None,
        block, num_warps=2, **OVERLAPPING,
    )  # fmt: skip
    return out
