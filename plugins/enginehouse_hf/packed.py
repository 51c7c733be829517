"""Weights of few bits: their form in memory, quantising to it, and unpacking, in plain torch.

FP8: one ``float8_e4m3fn`` per weight. Four bits: eight weights per int32. Both with factors per row, or per group of
columns of a row. Files of every format are brought to this form by ``stored.py``; kernels are in ``cuda/packed.py``.
"""

from __future__ import annotations

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
    "pack_codes",
    "quantized",
    "rounds_states",
    "rows_from",
    "unpacked",
]

Quantize = Literal["fp8", "int4"]

_LARGEST_FP8 = 448.0
_GROUPS = (128, 64, 32)
"""Columns that share a factor when weights are quantised to four bits: the first size that divides a row."""


@frozen(eq=False)
class Packed:
    """A matrix of (rows, width).

    Attributes:
        codes: (rows, width) float8_e4m3fn, or (rows, width / 8) int32. Bits 4k to 4k + 3 of word j of a group are its
            column k * (group / 8) + j, so that the columns of one k are neighbours.
        scales: (rows, groups), factors of the codes.
        zeros: (rows, groups) uint8, what is subtracted from four-bit codes; None is 8.
        bias: (rows,), added to the product.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.codes.shape[1] * (8 if self.codes.dtype == torch.int32 else 1)


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


def pack_codes(codes: Tensor, group: int) -> Tensor:
    """(rows, width / 8) int32 of (rows, width) integers from 0 to 15."""
    rows, width = codes.shape
    nibbles = codes.to(torch.int64).view(rows, width // group, 8, group // 8)
    shifts = torch.arange(0, 32, 4, device=codes.device)[:, None]
    words = (nibbles << shifts).sum(2).view(rows, width // 8)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    """(rows, width) weights, computed in float32."""
    rows, num_groups = packed.scales.shape
    scales = packed.scales.float()[:, :, None]
    if packed.codes.dtype != torch.int32:
        codes = packed.codes.float().view(rows, num_groups, -1)
    else:
        words = packed.codes.view(rows, num_groups, 1, -1)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
        zeros = 8 if packed.zeros is None else packed.zeros.to(torch.int32)[:, :, None]
        codes = (((words >> shifts) & 15).flatten(2) - zeros).float()
    return (codes * scales).view(rows, -1).to(dtype)


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
    scales = ((high - low) / 15.0).clamp_min(1e-8)
    scales = scales.to(torch.float16) if float(scales.max()) < 6e4 and float(scales.min()) > 1e-6 else scales
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    return Packed(pack_codes(codes.view(wide.shape), group), scales, zeros.to(torch.uint8))


def joined(parts: Sequence[Packed]) -> Packed:
    """Return the rows of all parts as one matrix.

    Raises:
        ValueError: the parts are packed in different forms.
    """
    first = parts[0]
    forms = {(part.codes.dtype, part.scales.shape[1], part.zeros is None, part.bias is None) for part in parts}
    if len(forms) != 1:
        raise ValueError("the projections that belong together are quantised in different forms")

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(given) if given else None

    return Packed(
        torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        torch.cat([part.scales for part in parts]),
        join([part.zeros for part in parts]),
        join([part.bias for part in parts]),
    )


def rows_from(part: Packed, begin: int, end: int | None = None) -> Packed:
    """Return the rows from ``begin`` to ``end``, as views."""
    rows = slice(begin, end)
    zeros, bias = part.zeros, part.bias
    return Packed(
        part.codes[rows],
        part.scales[rows],
        None if zeros is None else zeros[rows],
        None if bias is None else bias[rows],
    )


def num_packed(model: nn.Module) -> int:
    """Number of packed weights in a model, which are not parameters of torch."""
    parts = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(part.num_rows * part.width for part in parts)
