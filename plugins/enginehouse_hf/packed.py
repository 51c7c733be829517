"""Weights of few bits: their form in memory, quantising to it, and unpacking, in plain torch.

FP8: one ``float8_e4m3fn`` per weight. Four bits: two weights per byte. Both with factors per row, or per group of
columns of a row. Files of every format are brought to this form by ``stored.py``; kernels are in ``cuda/packed.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = [
    "Packed",
    "PackedLinear",
    "Quantize",
    "joined",
    "num_packed",
    "pack_four_bits",
    "quantized",
    "rounds_states",
    "rows_from",
    "unpacked",
]

Quantize = Literal["fp8", "int4"]

_LARGEST_FP8 = 448.0
_GROUPS = (128, 64, 32)
"""Columns that share a factor of four-bit weights; larger groups are divided, which repeats their factor."""


@frozen(eq=False)
class Packed:
    """A matrix of (rows, width).

    Attributes:
        codes: (rows, width) float8_e4m3fn; or (rows, width / 2) uint8, four bits each: byte 4t + 2s + e of 16 holds
            of their 32 columns 16s + 2t + e in its lower half and that 8 further on in its upper half. So four bytes
            are what one thread of tensor cores needs for two steps.
        scales: (rows, groups), factors of the codes, float. For four bits int32, groups of 32, 64 or 128 columns: the
            bits of a float32 factor, whose lowest 8 are what is subtracted from the codes.
        bias: (rows,), added to the product.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @property
    def is_four_bits(self) -> bool:
        """True for four bits, false for FP8."""
        return self.codes.dtype == torch.uint8

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.codes.shape[1] * (2 if self.is_four_bits else 1)

    @property
    def group(self) -> int:
        """Number of columns of a row with the same factor."""
        return self.width // self.scales.shape[1]


class PackedLinear(nn.Module):
    """A projection with packed weights. Its own ``forward`` unpacks them: the reference for the kernels.

    Args:
        packed: the weights, and the bias.
    """

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        """``linear(x, weights, bias)``."""
        if rounds_states(x.flatten(0, -2), self.packed):
            found = quantized(x.flatten(0, -2), "fp8")
            x = unpacked(found, x.dtype).view(x.shape)
        return linear(x, unpacked(self.packed, x.dtype), self.packed.bias)


def rounds_states(x: Tensor, packed: Packed) -> bool:
    """True if (T, width) states are rounded to FP8, too, with a factor for each: that multiplies twice as fast.

    For more than one token in bfloat16, on Hopper and later GPUs, if a row has one factor.
    """
    is_fp8 = packed.codes.dtype == torch.float8_e4m3fn and packed.scales.shape[1] == 1
    is_usual = is_fp8 and len(x) > 1 and x.dtype == torch.bfloat16 and x.is_cuda
    return is_usual and torch.cuda.get_device_capability(x.device) >= (9, 0)


def pack_four_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Packed:
    """Pack weights ``(codes - zeros) * scales``.

    Args:
        codes: (rows, width) integers from 0 to 15.
        scales: (rows, groups), groups of a multiple of 32 columns; rounded to 16 bits of mantissa.
        zeros: (rows, groups) integers from 0 to 255; None is 8.
    """
    rows, width = codes.shape
    group = math.gcd(width // scales.shape[1], _GROUPS[0])
    # Of 32 columns: two steps of a tensor core, lower or upper half of the byte, four threads, two neighbours.
    halves = codes.to(torch.uint8).view(rows, -1, 2, 2, 4, 2).permute(3, 0, 1, 4, 2, 5)
    factors = _rounded(scales).view(torch.int32) | (8 if zeros is None else zeros.to(torch.int32))
    repeats = width // group // scales.shape[1]
    return Packed((halves[0] | (halves[1] << 4)).reshape(rows, width // 2), factors.repeat_interleave(repeats, 1))


def _rounded(scales: Tensor) -> Tensor:
    """Float32 without the lowest 8 bits."""
    return ((scales.float().contiguous().view(torch.int32) + 128) & -256).view(torch.float32)


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    """(rows, width) weights, computed in float32."""
    rows, num_groups = packed.scales.shape
    if packed.is_four_bits:
        halves = torch.stack([packed.codes & 15, packed.codes >> 4]).view(2, rows, -1, 4, 2, 2)
        codes = halves.permute(1, 2, 4, 0, 3, 5).reshape(rows, num_groups, -1).float()
        codes = codes - (packed.scales & 255)[:, :, None]
        scales = (packed.scales & -256).view(torch.float32)
    else:
        codes, scales = packed.codes.float().view(rows, num_groups, -1), packed.scales.float()
    return (codes * scales[:, :, None]).view(rows, -1).to(dtype)


def quantized(weight: Tensor, kind: Quantize) -> Packed:
    """Round (rows, width) weights to the nearest codes.

    FP8 has one factor per row. Four bits have a factor and a zero per group of 128 columns (or 64 or 32) of a row.

    Raises:
        ValueError: no such group divides a row.
    """
    wide = weight.float()
    if kind == "fp8":
        scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / _LARGEST_FP8
        return Packed((wide / scales).to(torch.float8_e4m3fn), scales)
    width = weight.shape[1]
    group = next((size for size in _GROUPS if width % size == 0), None)
    if group is None:
        raise ValueError(f"rows of {width} weights cannot be cut into groups of {_GROUPS[-1]}")
    groups = wide.view(len(wide), -1, group)
    low, high = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
    scales = _rounded(((high - low) / 15.0).clamp_min(1e-8))
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    return pack_four_bits(codes.view(wide.shape), scales, zeros)


def joined(parts: Sequence[Packed]) -> Packed:
    """Return the rows of all parts as one matrix.

    Raises:
        ValueError: the parts are packed in different forms.
    """
    first = parts[0]
    forms = {(part.codes.dtype, part.scales.shape[1], part.bias is None) for part in parts}
    if len(forms) != 1:
        raise ValueError("the projections that belong together are quantised in different forms")

    biases = [part.bias for part in parts if part.bias is not None]
    return Packed(
        torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        torch.cat([part.scales for part in parts]),
        torch.cat(biases) if biases else None,
    )


def rows_from(part: Packed, begin: int, end: int | None = None) -> Packed:
    """Return the rows from ``begin`` to ``end``, as views."""
    rows = slice(begin, end)
    return Packed(part.codes[rows], part.scales[rows], None if part.bias is None else part.bias[rows])


def num_packed(model: nn.Module) -> int:
    """Number of packed weights in a model, which are not parameters of torch."""
    parts = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(part.num_rows * part.width for part in parts)
