"""Keys, or values, of all places of one layer: in the type of the model, or as 8-bit floats with factors.

A factor belongs to one head of one token, so that it is found from the numbers themselves when they are stored: no
calibration, and no number is cut off. vLLM and SGLang have one factor per layer or per head for all tokens instead,
which is 1 unless a model was calibrated. It costs four bytes per head and token; with two, which cannot be copied ahead
of their use, decode attention took up to a fifth longer.

Made by ``opening.py``; written by the networks and by the runner, read by attention.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.facts import Shape

__all__ = ["KvTensor", "KvType", "store_heads"]

KvType = Literal["fp8"]

_LARGEST = 448.0
_LEAST = 1e-20
"""The largest number of a head counts as at least this, so that a head of zeros has a factor."""

_LARGEST_FP8, _LEAST_LARGEST = tl.constexpr(_LARGEST), tl.constexpr(_LEAST)


@triton.jit
def store_heads(heads, numbers, scales, cell, is_head, column, DIM: tl.constexpr, PACKS: tl.constexpr):
    """Store heads, one a row, in a :class:`KvTensor`.

    Args:
        heads: (HEADS, COLUMNS), zero from column ``DIM`` on.
        cell: (HEADS,), place times number of heads plus head.
        is_head: (HEADS,), the rows to store.
        PACKS: in 8 bits.
    """
    at_heads = numbers + cell[:, None] * DIM + column[None, :]
    mask = is_head[:, None] & (column < DIM)[None, :]
    if PACKS:
        wide = heads.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), _LEAST_LARGEST)
        scale = largest / _LARGEST_FP8
        tl.store(at_heads, (wide / scale[:, None]).to(tl.float8e4nv), mask=mask)
        tl.store(scales + cell, scale, mask=is_head)
    else:
        tl.store(at_heads, heads, mask=mask)


@triton.jit
def _gather(
    codes, scales, places, out,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    await_previous()
    seen = tl.program_id(0).to(tl.int64)
    place = tl.load(places + seen).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    is_head = head < NUM_HEADS
    inside = is_head[:, None] & (column < DIM)[None, :]
    scale = tl.load(scales + place * NUM_HEADS + head, mask=is_head, other=0.0)
    cell = head[:, None] * DIM + column[None, :]
    code = tl.load(codes + place * NUM_HEADS * DIM + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + seen * NUM_HEADS * DIM + cell, (code * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@frozen(eq=False)
class KvTensor:
    """Keys, or values, of one layer.

    Attributes:
        numbers: (num_places, num_kv, head_dim), in the type of the model, or float8_e4m3fn.
        scales: (num_places, num_kv) float32, the factors of numbers in 8 bits; None for others.
    """

    numbers: Tensor
    scales: Tensor | None = None

    @classmethod
    def allocate(
        cls, num_places: int, shape: Shape, dtype: torch.dtype, device: torch.device, kind: KvType | None
    ) -> KvTensor:
        """Return zeros; ``dtype`` is that of the model."""
        kept = dtype if kind is None else torch.float8_e4m3fn
        scales = None if kind is None else torch.zeros(num_places, shape[0], dtype=torch.float32, device=device)
        return cls(torch.zeros(num_places, *shape, dtype=kept, device=device), scales)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory, (num_places, ...); 8-bit floats as bytes, which every operation of torch takes."""
        if self.scales is None:
            return [self.numbers]
        return [self.numbers.view(torch.uint8), self.scales]

    def write(self, places: Tensor, new: Tensor) -> None:
        """Store ``new``, (T, num_kv, head_dim) in the type of the model, at ``places``, (T,) int64."""
        if self.scales is None:
            self.numbers.index_copy_(0, places, new)
            return
        wide = new.float()
        scales = wide.abs().amax(-1).clamp_min(_LEAST) / _LARGEST
        codes = (wide / scales[..., None]).to(torch.float8_e4m3fn)
        for kept, part in zip(self.tensors, (codes.view(torch.uint8), scales), strict=True):
            kept.index_copy_(0, places, part)

    def gather(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """(num_seen, num_kv, head_dim) in the type of the model, ``dtype``; ``places`` is (num_seen,) int32."""
        if self.scales is None:
            return self.numbers.index_select(0, places)
        _, num_heads, dim = self.numbers.shape
        out = torch.empty(len(places), num_heads, dim, dtype=dtype, device=places.device)
        columns = max(16, triton.next_power_of_2(dim))
        _gather[(len(places),)](
            self.numbers, self.scales, places, out, num_heads, triton.next_power_of_2(num_heads), dim, columns,
            num_warps=4, **OVERLAPPING,
        )  # fmt: skip
        return out
