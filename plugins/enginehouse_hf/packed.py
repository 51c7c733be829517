"""Weights of few bits: their form in memory, quantising to it, and unpacking, in plain torch.

8 bits: one ``float8_e4m3fn`` per weight, or for projections to logits one ``int8``. Four bits: eight weights per
int32, integers or the floats e2m1 of MXFP4; for projections, two integers per byte. All have factors per row, or per
group of columns of a row. Files of every format are brought to this form by ``stored.py``; kernels are in
``cuda/packed.py``, those of experts in ``cuda/grouped.py``.

Source: "OCP Microscaling Formats (MX) Specification", version 1.0, for MXFP4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = [
    "E2M1",
    "MAX_KEPT",
    "MAX_KEPT_TILES",
    "MAX_TILES",
    "Form",
    "Packed",
    "PackedExperts",
    "PackedLinear",
    "Quantize",
    "are_experts",
    "has_tensor_cores_of_8_bits",
    "joined",
    "num_packed",
    "pack_codes",
    "quantized",
    "quantized_experts",
    "quantized_head",
    "rounds_states",
    "rows_from",
    "tiled",
    "unpacked",
]

Quantize = Literal["fp8", "int4"]
Form = Literal["fp8", "int8", "int4", "mxfp4", "tiles"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7 of MXFP4; codes from 8 on are the same, negative."""

MAX_KEPT, MAX_KEPT_TILES = 32, 64
"""Most tokens whose states are not rounded to FP8, with weights in FP8 and in tiles of four bits."""

MAX_TILES = 256
"""Most tokens that are multiplied with tiles of four bits as they are."""

_LARGEST_FP8 = 448.0
_GROUPS = (128, 64, 32)
"""Columns that share a factor when weights are quantised to four bits: the first size that divides a row."""


@frozen(eq=False)
class Packed:
    """A matrix of (rows, width).

    Attributes:
        codes: (rows, width) float8_e4m3fn or int8, or (rows, width / 8) int32. Bits 4k to 4k + 3 of word j of a group
            are its column k * (group / 8) + j, so that the columns of one k are neighbours. In tiles (rows, width / 2)
            uint8: byte j of 16 holds column j of their 32 columns in its lower half, and column j + 16 in the upper.
        scales: (rows, groups), factors of the codes. uint8 for MXFP4: exponents of two, plus 127. In tiles int32, for
            32, 64 or 128 columns: the bits of a float32 factor, whose lowest 8 are what is subtracted from the codes.
        zeros: (rows, groups) uint8, what is subtracted from four-bit codes; None is 8.
        bias: (rows,), added to the product.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def form(self) -> Form:
        """Kind of the codes."""
        if self.codes.dtype == torch.int32:
            return "mxfp4" if self.scales.dtype == torch.uint8 else "int4"
        forms: dict[torch.dtype, Form] = {torch.uint8: "tiles", torch.int8: "int8"}
        return forms.get(self.codes.dtype, "fp8")

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.codes.shape[1] * {"fp8": 1, "int8": 1, "tiles": 2}.get(self.form, 8)

    @property
    def group(self) -> int:
        """Number of columns of a row with the same factor."""
        return self.width // self.scales.shape[1]


class PackedLinear(nn.Module):
    """A projection with packed weights. Its own ``forward`` unpacks them: the reference for the kernels.

    Args:
        packed: the weights, and the bias. Four bits are brought to the form of tiles.
    """

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = tiled(packed) if packed.form == "int4" else packed

    def forward(self, x: Tensor) -> Tensor:
        """``linear(x, weights, bias)``."""
        if rounds_states(x.flatten(0, -2), self.packed):
            found = quantized(x.flatten(0, -2), "fp8")
            x = unpacked(found, x.dtype).view(x.shape)
        return linear(x, unpacked(self.packed, x.dtype), self.packed.bias)


class PackedExperts(nn.Module):
    """Experts with packed weights. Their own ``forward`` unpacks those that are chosen: the reference for the kernels.

    Args:
        plain: transformers' module, of which only the activation is used.
        gate_up: (num_experts * 2 * width, hidden_size), with the rows of an expert in the order of ``plain``.
        down: (num_experts * hidden_size, width).
    """

    def __init__(self, plain: nn.Module, num_experts: int, gate_up: Packed, down: Packed) -> None:
        super().__init__()
        self._plain = (plain,)  # in a tuple: not a module of the model
        self.num_experts, self.gate_up, self.down = num_experts, gate_up, down

    @property
    def plain(self) -> Any:
        """transformers' module, without its weights."""
        return self._plain[0]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts of each token: (T, hidden_size) states, (T, num_chosen) experts and their weights."""
        result, dtype = torch.zeros_like(hidden_states), hidden_states.dtype
        for index in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == index)
            gate_up, down = self.expert(self.gate_up, index), self.expert(self.down, index)
            active = self.plain._apply_gate(linear(hidden_states[token], unpacked(gate_up, dtype), gate_up.bias))
            update = linear(active, unpacked(down, dtype), down.bias) * top_k_weights[token, choice, None]
            result.index_add_(0, token, update.to(dtype))
        return result

    def expert(self, part: Packed, index: int) -> Packed:
        """The rows of one expert."""
        num_rows = part.num_rows // self.num_experts
        return rows_from(part, index * num_rows, (index + 1) * num_rows)


def rounds_states(x: Tensor, packed: Packed) -> bool:
    """True if (T, width) states are rounded to FP8, too, with a factor for each: that multiplies twice as fast.

    In bfloat16, on Hopper and later GPUs: with FP8 weights, if a row has one factor, for more than :data:`MAX_KEPT`
    tokens; with tiles of four bits for more than 64 and up to 256 tokens. More multiply unpacked weights.
    """
    if not has_tensor_cores_of_8_bits(x):
        return False
    if packed.form == "tiles":
        may_round = MAX_KEPT_TILES < len(x) <= MAX_TILES
    else:
        may_round = packed.form == "fp8" and packed.scales.shape[1] == 1 and len(x) > MAX_KEPT
    return may_round


def has_tensor_cores_of_8_bits(x: Tensor) -> bool:
    """True for bfloat16 on Hopper and later GPUs, for which kernels multiply states as numbers of 8 bits."""
    return x.dtype == torch.bfloat16 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def pack_codes(codes: Tensor, group: int) -> Tensor:
    """(rows, width / 8) int32 of (rows, width) integers from 0 to 15."""
    rows, width = codes.shape
    nibbles = codes.to(torch.int32).view(rows, width // group, 8, group // 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)[:, None]
    return (nibbles << shifts).sum(2, dtype=torch.int32).view(rows, width // 8)  # the last fills the sign


def _nibbles(packed: Packed) -> Tensor:
    """(rows, groups, group) four-bit codes of words."""
    words = packed.codes.view(*packed.scales.shape, 1, -1)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
    return ((words >> shifts) & 15).flatten(2)


def tiled(packed: Packed) -> Packed:
    """Bring integers of four bits in words to the form of tiles.

    Factors are rounded to 16 bits of mantissa, and repeated where a group has more than 128 columns.
    """
    rows, width = packed.num_rows, packed.width
    group = math.gcd(packed.group, _GROUPS[0])
    halves = _nibbles(packed).to(torch.uint8).view(rows, -1, 2, 16).unbind(2)
    bits = (packed.scales.float().contiguous().view(torch.int32) + 128) & -256
    factors = bits | (8 if packed.zeros is None else packed.zeros.to(torch.int32))
    codes = (halves[0] | (halves[1] << 4)).reshape(rows, width // 2)
    return Packed(codes, factors.repeat_interleave(packed.group // group, 1), bias=packed.bias)


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    """(rows, width) weights, computed in float32."""
    rows, num_groups = packed.scales.shape
    if packed.form == "tiles":
        halves = [half.view(rows, -1, 16) for half in (packed.codes & 15, packed.codes >> 4)]
        codes = torch.cat(halves, 2).view(rows, num_groups, -1) - (packed.scales & 255)[:, :, None]
        return (codes * (packed.scales & -256).view(torch.float32)[:, :, None]).view(rows, -1).to(dtype)
    scales = packed.scales.float()[:, :, None]
    if packed.form in ("fp8", "int8"):
        codes = packed.codes.float().view(rows, num_groups, -1)
        return (codes * scales).view(rows, -1).to(dtype)
    codes = _nibbles(packed)
    if packed.form == "mxfp4":
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
        return torch.ldexp(table[codes], packed.scales.to(torch.int32)[:, :, None] - 127).view(rows, -1).to(dtype)
    zeros = 8 if packed.zeros is None else packed.zeros.to(torch.int32)[:, :, None]
    return ((codes - zeros).float() * scales).view(rows, -1).to(dtype)


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


def quantized_head(weight: Tensor) -> Packed:
    """Round (rows, width) weights to the nearest integers of 8 bits, with a factor per row.

    FP8 would be off four times as far: its codes have a distance of up to a sixteenth of themselves.
    """
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
    return Packed((wide / scales).round().to(torch.int8), scales)


def are_experts(module: nn.Module) -> bool:
    """True for a module of transformers with the weights of all experts in one."""
    weights = {name for name, part in module.named_parameters(recurse=False) if part.dim() == 3}
    return weights == {"gate_up_proj", "down_proj"}


def quantized_experts(plain: nn.Module, kind: Quantize) -> PackedExperts:
    """Round the weights of all experts, see :func:`quantized`; they are removed from ``plain``."""
    weights, parts = dict(plain.named_parameters(recurse=False)), []
    for name in ("gate_up_proj", "down_proj"):
        weight, bias = weights[name].detach(), weights.get(f"{name}_bias")
        if getattr(plain, "is_transposed", False):
            weight = weight.transpose(1, 2)
        whole = joined([quantized(expert, kind) for expert in weight])
        parts.append(whole if bias is None else evolve(whole, bias=bias.detach().flatten()))
    for name in weights:
        delattr(plain, name)
    return PackedExperts(plain, len(weight), *parts)


def joined(parts: Sequence[Packed]) -> Packed:
    """Return the rows of all parts as one matrix.

    Raises:
        ValueError: the parts are packed in different forms.
    """
    first = parts[0]
    if len({(part.form, part.scales.shape[1], part.bias is None) for part in parts}) != 1:
        raise ValueError("the projections that belong together are quantised in different forms")
    zeros: list[Tensor | None] = [part.zeros for part in parts]
    if any(one is not None for one in zeros):
        zeros = [
            torch.full_like(part.scales, 8, dtype=torch.uint8) if part.zeros is None else part.zeros for part in parts
        ]

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(given) if given else None

    return Packed(
        torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        torch.cat([part.scales for part in parts]),
        join(zeros),
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


def num_packed(model: Any) -> int:
    """Number of packed weights in a model of transformers, which are not parameters of torch; tied ones do not count.

    These are in memory once as embeddings, which are parameters, and once packed.
    """
    tied = model.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    parts = [module.packed for module in model.modules() if isinstance(module, PackedLinear) and module is not tied]
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    parts += [part for one in experts for part in (one.gate_up, one.down)]
    return sum(part.num_rows * part.width for part in parts)
