"""Products with weights of few bits, which are unpacked in registers: what is read from memory is the packed form.

One token: sums in float32 on the ordinary cores; four bits whose columns may be split on tensor cores. More: FP8 with
one factor per row multiplies FP8 by FP8, with one factor per token found from its largest number. Other weights are
unpacked: for up to :data:`MAX_UNPACKED` tokens in registers, as numbers of the model's type, which are exact, with the
factors of each group applied to its sum; for more in memory, for cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation
from enginehouse_hf.packed import Packed, rounds_states, unpacked

__all__ = ["MAX_FP8", "MAX_UNPACKED", "project_packed"]

MAX_FP8 = 256
"""Most tokens of the kernel that multiplies FP8 by FP8; more by cuBLAS."""

MAX_UNPACKED = 64
"""Most tokens for which weights are unpacked in registers where FP8 cannot be multiplied by FP8."""

_LARGEST_FP8 = tl.constexpr(448.0)

_HAS_ASSEMBLY = tl.constexpr(torch.cuda.is_available())


def _pair_up(k: int) -> str:
    """Assembly: the codes number ``k`` of two words, each added to 128, as a pair of bfloat16 numbers."""
    halves, shift = ("0x5410", 4 * k) if k < 4 else ("0x7632", 4 * k - 16)
    moved = f"shr.u32 t, t, {shift};" if shift else ""
    return f"{{.reg .b32 t; prmt.b32 t, $1, $2, {halves}; {moved} lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;}}"


_PAIRED = tl.constexpr(tuple(_pair_up(k) for k in range(8)))


@triton.jit
def _codes(word, index):
    """The four-bit codes number ``index``, (8, 1) or one of them, of words that are broadcast against it, in float32.

    A code becomes a part of the mantissa; only two of the eight places need a shift, the slower operation.
    """
    place = tl.where(index < 2, index + 2, tl.where(index < 5, index, index - 3)) * 4
    moved = tl.where(index < 2, word << 8, tl.where(index < 5, word, word >> 12))
    bits = (moved & (15 << place)) | ((150 - place) << 23)
    return bits.to(tl.float32, bitcast=True) - (1 << (23 - place)).to(tl.float32)


@triton.jit
def _project_single(
    x, codes, scales, zeros, bias, out, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, IS_INT4: tl.constexpr,
    IS_GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    LANES: tl.constexpr = GROUP // 8 if IS_INT4 else GROUP
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    PARTS: tl.constexpr = 1 if KIND is None else 2
    index = tl.arange(0, PARTS * ROWS)
    first = tl.program_id(0) * ROWS + index % ROWS
    is_row = first < num_rows
    rows = (first + index // ROWS * num_rows).to(tl.int64)  # those of the gate, then those of the other factor
    group = tl.arange(0, GROUPS)
    nibble = tl.arange(0, 8 if IS_INT4 else 1)
    lane = tl.arange(0, LANES)
    sums = tl.zeros([PARTS * ROWS, GROUPS, LANES], tl.float32)
    for start in tl.static_range(0, NUM_GROUPS, GROUPS):
        is_group = start + group < NUM_GROUPS
        both = is_row[:, None] & is_group[None, :]
        at_group = rows[:, None] * NUM_GROUPS + (start + group)[None, :]
        at_codes = codes + (at_group * LANES)[:, :, None, None] + lane[None, None, None, :]
        word = tl.load(at_codes, mask=both[:, :, None, None], other=0.0, eviction_policy="evict_first")
        if IS_GROUPED:
            scale = tl.load(scales + at_group, mask=both, other=0.0).to(tl.float32)
        zero = 8.0
        if HAS_ZEROS:
            zero = tl.load(zeros + at_group, mask=both, other=0).to(tl.float32)[:, :, None, None]
        if start == 0:
            await_previous()
        at_x = x + ((start + group) * GROUP)[:, None, None] + (nibble * LANES)[None, :, None] + lane[None, None, :]
        value = tl.load(at_x, mask=is_group[:, None, None], other=0.0).to(tl.float32)[None, :, :, :]
        if IS_INT4:
            part = tl.sum((_codes(word, nibble[None, None, :, None]) - zero) * value, 2)
        else:
            part = tl.sum(word.to(tl.float32) * value, 2)
        if IS_GROUPED:
            sums += part * scale[:, :, None]
        else:
            sums += part
    result = tl.sum(tl.sum(sums, 2), 1)
    if not IS_GROUPED:
        result *= tl.load(scales + rows, mask=is_row, other=0.0).to(tl.float32)
    if KIND is None:
        if HAS_BIAS:
            result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out + rows, result.to(kind), mask=is_row)
    else:
        gate, up = tl.split(tl.trans(tl.reshape(result, [2, ROWS])))
        active = activate(gate.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(out + row, (active * up.to(kind).to(tl.float32)).to(kind), mask=row < num_rows)


@triton.jit
def _project_few(
    x, token_scales, codes, scales, bias, out, num_tokens, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    IS_GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    await_previous()
    kind = x.dtype.element_ty
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    OWN: tl.constexpr = (NUM_GROUPS + SPLITS - 1) // SPLITS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    split = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    lane = tl.arange(0, GROUP)
    row = rows.to(tl.int64)
    at_codes = codes + row[None, :] * (NUM_GROUPS * GROUP) + lane[:, None]
    at_x = x + token.to(tl.int64)[:, None] * WIDTH + lane[None, :]
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for group in range(split * OWN, min(split * OWN + OWN, NUM_GROUPS)):
        word = tl.load(at_codes + group * GROUP, mask=is_row[None, :], other=0.0)
        if IS_GROUPED:
            scale = tl.load(scales + row * NUM_GROUPS + group, mask=is_row, other=0.0).to(tl.float32)
        value = tl.load(at_x + group * GROUP, mask=is_token, other=0.0)
        if IS_GROUPED:
            sums += tl.dot(value, word.to(kind)) * scale[None, :]
        else:
            sums = tl.dot(value, word.to(kind), sums)
    if not IS_GROUPED:
        sums *= tl.load(scales + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if IS_FP8:
        sums *= tl.load(token_scales + token, mask=token < num_tokens, other=0.0)[:, None]
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, added, 0.0)[None, :]
    at_out = out + (token.to(tl.int64)[:, None] * SPLITS + split) * num_rows + rows[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_token & is_row[None, :])


@triton.jit
def _whole(word, k: tl.constexpr, kind: tl.constexpr):
    """Add the four-bit codes number ``k`` of words to 128 (bfloat16) or 1024 (float16), which is exact."""
    if kind == tl.bfloat16 and _HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(_PAIRED[k], "=r,r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif kind == tl.bfloat16:
        return (((word >> (4 * k)) & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (((word >> (4 * k)) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _project_four_bits(
    x, codes, scales, zeros, bias, out, num_tokens, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    await_previous()
    kind: tl.constexpr = x.dtype.element_ty
    LANES: tl.constexpr = GROUP // 8
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    OWN: tl.constexpr = (NUM_GROUPS + SPLITS - 1) // SPLITS
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < num_rows
    split = tl.program_id(1)
    token = tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    lane = tl.arange(0, LANES)
    at_codes = codes + rows[None, :] * (NUM_GROUPS * LANES) + lane[:, None]
    at_x = x + token.to(tl.int64)[:, None] * WIDTH + lane[None, :]
    ones = tl.full([LANES, ROWS], 1.0, kind)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for group in range(split * OWN, min(split * OWN + OWN, NUM_GROUPS)):
        word = tl.load(at_codes + group * LANES, mask=is_row[None, :], other=0)
        scale = tl.load(scales + rows * NUM_GROUPS + group, mask=is_row, other=0.0).to(tl.float32)
        added = tl.zeros([ROWS], tl.float32) + (128.0 if kind == tl.bfloat16 else 1024.0)
        if HAS_ZEROS:
            added += tl.load(zeros + rows * NUM_GROUPS + group, mask=is_row, other=0).to(tl.float32)
        else:
            added += 8.0
        part = tl.zeros([TOKENS, ROWS], tl.float32)
        total = tl.zeros([TOKENS, ROWS], tl.float32)
        for k in tl.static_range(8):
            value = tl.load(at_x + group * GROUP + k * LANES, mask=is_token, other=0.0)
            part = tl.dot(value, _whole(word, k, kind), part)
            total = tl.dot(value, ones, total)  # one product for all rows: the compiler sees that they are equal
        sums += (part - added[None, :] * total) * scale[None, :]
    if HAS_BIAS:
        own = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, own, 0.0)[None, :]
    at_out = out + (token.to(tl.int64)[:, None] * SPLITS + split) * num_rows + rows[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_token & is_row[None, :])


@triton.jit
def _round_tokens(x, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """FP8 codes and the factor of one token."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / _LARGEST_FP8
    tl.store(codes + row * WIDTH + columns, (value / scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _unpack(codes, scales, zeros, out, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    await_previous()
    LANES: tl.constexpr = GROUP // 8
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    is_group = group < NUM_GROUPS
    word = tl.load(codes + (row * NUM_GROUPS + group)[:, None] * LANES + lane[None, :], mask=is_group[:, None], other=0)
    scale = tl.load(scales + row * NUM_GROUPS + group, mask=is_group, other=0.0).to(tl.float32)
    zero = tl.zeros([BLOCK], tl.float32) + 8.0
    if HAS_ZEROS:
        zero = tl.load(zeros + row * NUM_GROUPS + group, mask=is_group, other=0).to(tl.float32)
    for k in tl.static_range(8):
        value = (_codes(word, k) - zero[:, None]) * scale[:, None]
        at_out = out + ((row * NUM_GROUPS + group) * GROUP + k * LANES)[:, None] + lane[None, :]
        tl.store(at_out, value.to(out.dtype.element_ty), mask=is_group[:, None])


def project_packed(x: Tensor, part: Packed, activation: Activation | None = None, *, may_split: bool = False) -> Tensor:
    """Compute ``linear(x, weights, bias)`` of packed weights.

    Args:
        x: (T, width).
        part: (num_rows, width); with ``activation``, for one token, the rows of the gate, then as many of the other
            factor: the result is ``activation(gate) * up``, half as many rows.
        may_split: the columns may be split among programs, which leaves the sum to the caller.

    Returns:
        (T, num_rows), or with ``may_split`` (T, n, num_rows) float32, whose n rows add up to the result.
    """
    num_tokens, is_int4 = len(x), part.codes.dtype == torch.int32
    suits = x.dtype != torch.float32 and (not is_int4 or _group(part) >= _LEAST_GROUP)
    splits_one = may_split and len(part.codes) < _MANY_ROWS  # elsewhere the ordinary cores are faster for one token
    if is_int4 and suits and (splits_one if num_tokens == 1 else num_tokens <= MAX_UNPACKED):
        return _four_bits(x, part, may_split)
    if num_tokens == 1:
        return _single(x, part, activation)
    assert activation is None
    if rounds_states(x, part):
        codes, scales = _rounded(x)
        if num_tokens <= MAX_FP8:
            return _few(codes, scales, part, x.dtype, may_split)
        result = torch._scaled_mm(codes, part.codes.T, scales, part.scales.T, out_dtype=x.dtype, use_fast_accum=True)
        return result if part.bias is None else result.add_(part.bias)
    if num_tokens <= MAX_UNPACKED and suits:
        return _few(x, None, part, x.dtype, may_split)
    return linear(x, _unpacked(part, x.dtype), part.bias)


def _group(part: Packed) -> int:
    """Columns that are taken together: those with one factor; of rows with one factor as many as suit."""
    num_groups, width = part.scales.shape[1], part.width
    return width // num_groups if num_groups > 1 else min(128, width & -width)


def _form(part: Packed) -> dict[str, Any]:
    is_int4 = part.codes.dtype == torch.int32
    is_grouped = is_int4 or part.scales.shape[1] > 1
    return {"IS_INT4": is_int4, "IS_GROUPED": is_grouped, "HAS_ZEROS": part.zeros is not None}


def _single(x: Tensor, part: Packed, activation: Activation | None) -> Tensor:
    num_rows = len(part.codes) // (1 if activation is None else 2)
    out = x.new_empty(1, num_rows)
    form, group = _form(part), _group(part)
    num_groups = part.width // group
    rows, columns, warps = _SINGLE["int4" if form["IS_INT4"] else "fp8"]
    rows = max(1, rows // (1 if activation is None else 2))
    groups = min(max(1, columns // group), triton.next_power_of_2(num_groups))
    _project_single[(triton.cdiv(num_rows, rows),)](
        x, part.codes, part.scales, x if part.zeros is None else part.zeros, x if part.bias is None else part.bias, out,
        num_rows, part.width, group, groups, rows, **form, HAS_BIAS=part.bias is not None, KIND=activation,
        num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    return out


_SINGLE = {"fp8": (8, 1024, 4), "int4": (8, 1024, 4)}
"""Rows, columns per turn and warps. Measured on an H200."""

_LEAST_GROUP = 128
"""Columns with one factor of which tensor cores can multiply an eighth at once."""

_LEAST_TOKENS = 64
"""Height of a tile of the tensor cores that multiply FP8."""

_MANY_ROWS = 16_384
"""Output rows that need no split of the columns."""


def _few(x: Tensor, token_scales: Tensor | None, part: Packed, dtype: torch.dtype, may_split: bool) -> Tensor:
    num_tokens, num_rows = len(x), len(part.codes)
    group = _group(part)
    splits = 4 if may_split and num_rows < _MANY_ROWS else 1
    least, most = (_LEAST_TOKENS, 128) if token_scales is not None else (16, 64)
    tokens = max(least, min(most, triton.next_power_of_2(num_tokens)))
    rows, warps, stages = _FEW
    if token_scales is not None and tokens == _LEAST_TOKENS:
        rows, warps, stages = 128, 4, 6
    elif token_scales is not None and num_rows >= _MANY_ROWS:
        rows, warps, stages = 128, 8, 3
    if num_rows < _MANY_ROWS and splits == 1:
        rows = rows // 2
    shape = (num_tokens, num_rows) if splits == 1 else (num_tokens, splits, num_rows)
    out = torch.empty(shape, dtype=dtype if splits == 1 else torch.float32, device=x.device)
    _project_few[(triton.cdiv(num_rows, rows), splits, triton.cdiv(num_tokens, tokens))](
        x, x if token_scales is None else token_scales, part.codes, part.scales,
        x if part.bias is None else part.bias, out, num_tokens, num_rows, part.width, group, tokens, rows, splits,
        IS_GROUPED=part.scales.shape[1] > 1, HAS_BIAS=part.bias is not None, IS_FP8=token_scales is not None,
        num_warps=warps, num_stages=stages, **OVERLAPPING,
    )  # fmt: skip
    return out


_FEW = (64, 4, 4)
"""Rows, warps and stages. Measured on an H200."""


def _four_bits(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    num_tokens, num_rows = len(x), len(part.codes)
    tokens = max(16, triton.next_power_of_2(num_tokens))
    form = "many" if num_rows >= _MANY_ROWS else "split" if may_split else "few"
    rows, warps, stages, splits = _FOUR_BITS[1 if num_tokens == 1 else tokens, form]
    shape = (num_tokens, num_rows) if splits == 1 else (num_tokens, splits, num_rows)
    out = torch.empty(shape, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    _project_four_bits[(triton.cdiv(num_rows, rows), splits)](
        x, part.codes, part.scales, x if part.zeros is None else part.zeros, x if part.bias is None else part.bias, out,
        num_tokens, num_rows, part.width, _group(part), tokens, rows, splits, HAS_ZEROS=part.zeros is not None,
        HAS_BIAS=part.bias is not None, num_warps=warps, num_stages=stages, **OVERLAPPING,
    )  # fmt: skip
    return out


_FOUR_BITS = {
    (1, "split"): (128, 4, 3, 16),
    (16, "many"): (128, 4, 3, 1),
    (16, "split"): (64, 2, 3, 8),
    (16, "few"): (32, 1, 4, 1),
    (32, "many"): (128, 8, 3, 1),
    (32, "split"): (128, 8, 3, 4),
    (32, "few"): (64, 4, 3, 1),
    (64, "many"): (64, 4, 3, 1),
    (64, "split"): (64, 4, 3, 4),
    (64, "few"): (64, 4, 3, 1),
}
"""Rows, warps, stages and splits of the columns. Measured on an H200."""


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes of (T, width), and (T, 1) factors."""
    num_tokens, width = x.shape
    codes = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    _round_tokens[(num_tokens,)](x, codes, scales, width, triton.next_power_of_2(width), num_warps=8, **OVERLAPPING)
    return codes, scales


def _unpacked(part: Packed, dtype: torch.dtype) -> Tensor:
    if part.codes.dtype != torch.int32:
        return unpacked(part, dtype)
    rows, num_groups = part.scales.shape
    out = torch.empty(rows, part.width, dtype=dtype, device=part.codes.device)
    block = min(16, triton.next_power_of_2(num_groups))
    _unpack[(rows, triton.cdiv(num_groups, block))](
        part.codes, part.scales, part.codes if part.zeros is None else part.zeros, out, part.width // num_groups,
        num_groups, part.zeros is not None, block, num_warps=4, **OVERLAPPING,
    )  # fmt: skip
    return out
