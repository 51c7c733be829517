"""Matrix-vector products for the step of a single sequence: the weights are read once, at full memory bandwidth.

With one token cuBLAS leaves a fifth of the bandwidth unused, and the small kernels between the products cost as much
again. Here the norm before a product, and the operations after it, are part of the same kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["project"]


@triton.jit
def _project(
    x, weight, bias, norm_weight, residual, out, eps, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    at_row = weight + rows.to(tl.int64)[:, None] * WIDTH
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    scale = 1.0
    if HAS_NORM and WIDTH > BLOCK:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            value = tl.load(x + start + columns, mask=start + columns < WIDTH, other=0.0).to(tl.float32)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for start in tl.static_range(0, WIDTH, BLOCK):
        inside = start + columns < WIDTH
        both = is_row[:, None] & inside[None, :]
        part = tl.load(at_row + start + columns[None, :], mask=both, other=0.0, eviction_policy="evict_first")
        if IS_GATED:
            at_up = at_row + num_rows.to(tl.int64) * WIDTH + start + columns[None, :]
            up_part = tl.load(at_up, mask=both, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            if WIDTH <= BLOCK:
                scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
            factor = tl.load(norm_weight + start + columns, mask=inside, other=0.0).to(tl.float32)
            value = ((value * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        sums += part.to(tl.float32) * value[None, :]
        if IS_GATED:
            ups += up_part.to(tl.float32) * value[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if IS_GATED:
        gate = result.to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = active * tl.sum(ups, 1).to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        result = result.to(kind).to(tl.float32) + tl.load(residual + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(kind), mask=is_row)


def project(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    rows: int | None = None,
    block: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """Compute ``weight @ norm(x)`` and fused operations, for one token.

    Args:
        x: (1, width).
        weight: (num_rows, width); with ``is_gated`` the rows of the gate, then as many of the other factor.
        bias: (num_rows,).
        norm: weight and epsilon of an RMS norm of ``x``.
        residual: (1, num_rows), added to the result and overwritten by the sum.
        is_gated: the result is ``silu(gate) * up``, half as many rows.

    Returns:
        (1, num_rows), half as many if gated; ``residual`` itself if given.
    """
    num_rows, width = weight.shape
    num_rows = num_rows // 2 if is_gated else num_rows
    out = residual if residual is not None else x.new_empty(1, num_rows)
    block = block or min(2048, triton.next_power_of_2(width))
    rows = rows or 2
    warps = warps or (4 if block >= 2048 else 2)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    _project[(triton.cdiv(num_rows, rows),)](
        x, weight, x if bias is None else bias, norm_weight, out, out, eps, num_rows, width, rows, block,
        norm is not None, bias is not None, residual is not None, is_gated, num_warps=warps,
    )  # fmt: skip
    return out
