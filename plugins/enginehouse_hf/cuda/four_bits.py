"""Products of several tokens with weights of four bits, which are unpacked in registers.

The codes are the left operand of the tensor cores, which may be in registers, as e4m3 numbers for states that are split
(see ``split_states.py``), otherwise as numbers of the model's type. What is subtracted from the codes of a group is
multiplied with the sum of its states instead, and its factors are applied to its sum. For more than ``MAX_TILES``
tokens weights are unpacked in memory, for cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.split_states import split_states
from enginehouse_hf.packed import MAX_TILES, Packed, rounds_states

__all__ = ["project_four_bits"]

_HALVES = tl.constexpr("and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;")
"""Assembly: the codes in the lower and in the upper halves of four bytes."""


@triton.jit
def _weights(byte, kind: tl.constexpr):
    """Codes of bytes, two for each, in the order of their columns; as e4m3 numbers over 512. All are exact."""
    if kind == tl.float8e4nv:
        lower, upper = tl.inline_asm_elementwise(
            _HALVES, "=&r,=r,r", [byte], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        lower, upper = byte & 15, byte >> 4
    blocks: tl.constexpr = [byte.shape[0], byte.shape[1] // 16, 16]
    both = tl.permute(tl.join(tl.reshape(lower, blocks), tl.reshape(upper, blocks)), (0, 1, 3, 2))
    code = tl.reshape(both, [byte.shape[0], 2 * byte.shape[1]])
    if kind == tl.float8e4nv:
        return code.to(kind, bitcast=True)
    elif kind == tl.bfloat16:
        return (code.to(tl.int16) | 0x4300).to(kind, bitcast=True) - 128.0
    else:
        return (code.to(tl.int16) | 0x6400).to(kind, bitcast=True) - 1024.0


@triton.jit(do_not_specialize=["num_tokens"])
def _project_few(
    x, x_sums, x_scales, codes, factors, bias, out, num_tokens, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x.dtype.element_ty
    UNIT: tl.constexpr = 1.0 / 512.0 if kind == tl.float8e4nv else 1.0  # of the codes as numbers of this type
    HALF: tl.constexpr = GROUP // 2
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    OWN: tl.constexpr = (NUM_GROUPS + SPLITS - 1) // SPLITS
    UNROLL: tl.constexpr = (256 if TOKENS * PARTS < 64 else 128) // GROUP
    tile = tl.program_id(0)  # of tokens: those that read the same weights follow each other
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    split = tl.program_id(2)
    column = tile * TOKENS * PARTS + tl.arange(0, TOKENS * PARTS)  # the parts of each token in turn
    row = tl.where(is_row, rows, 0)
    known = tl.where(column < num_tokens * PARTS, column, 0)
    await_previous()
    at_codes = codes + row.to(tl.int64)[:, None] * (WIDTH // 2) + tl.arange(0, HALF)[None, :]
    at_x = x + known.to(tl.int64)[None, :] * WIDTH + tl.arange(0, GROUP)[:, None]
    # What is subtracted from the codes, for all groups at once.
    own = split * OWN + tl.arange(0, PADDED)
    is_own = own < min(split * OWN + OWN, NUM_GROUPS)
    factor = tl.load(factors + own[None, :] + row[:, None] * NUM_GROUPS, mask=is_own[None, :], other=0)
    total = tl.load(x_sums + own[:, None] * num_tokens * PARTS + known[None, :], mask=is_own[:, None], other=0.0)
    subtracted = (factor & 255).to(tl.float32) * (factor & -256).to(tl.float32, bitcast=True)
    sums = tl.dot(subtracted, total, input_precision="tf32x3") * -UNIT
    for group in tl.range(
        split * OWN, min(split * OWN + OWN, NUM_GROUPS), num_stages=STAGES, loop_unroll_factor=UNROLL
    ):
        byte = tl.load(at_codes + group * HALF)
        value = tl.load(at_x + group * GROUP)
        scale = (tl.load(factors + group + row * NUM_GROUPS) & -256).to(tl.float32, bitcast=True)
        sums += tl.dot(_weights(byte, kind), value) * scale[:, None]
    token = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    sums = sums * (1.0 / UNIT)
    if PARTS == 2:
        high, low = tl.split(tl.reshape(sums, [ROWS, TOKENS, 2]))
        sums = high + low * 0.0625
    if kind == tl.float8e4nv:
        sums *= tl.load(x_scales + token, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, added, 0.0)[:, None]
    at_out = out + (token.to(tl.int64)[None, :] * SPLITS + split) * num_rows + rows[:, None]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_token[None, :] & is_row[:, None])


@triton.jit
def _unpack(
    codes, factors, out, num_groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of all rows
    is_group = group < num_groups
    at_codes = codes + group.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    byte = tl.load(at_codes, mask=is_group[:, None], other=0)
    factor = tl.load(factors + group, mask=is_group, other=0)[:, None]
    value = _weights(byte, tl.float16).to(tl.float32) - (factor & 255).to(tl.float32)
    value = (value * (factor & -256).to(tl.float32, bitcast=True)).to(out.dtype.element_ty)
    at_out = out + group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(at_out, value, mask=is_group[:, None])


def project_four_bits(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    """See :func:`enginehouse_hf.cuda.packed.project_packed`; for several tokens."""
    if len(x) <= MAX_TILES and x.dtype != torch.float32:
        return _few(x, part, may_split)
    return linear(x, _unpacked(part, x.dtype), part.bias)


def _few(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    states = split_states(x, part.group, 1 if rounds_states(x, part) else 2)
    num_tokens, num_rows, num_parts = len(x), part.num_rows, states.num_parts
    tokens = max(16 // num_parts, min(128 // num_parts, triton.next_power_of_2(num_tokens)))
    rows, warps, stages, programs = _FEW[tokens * num_parts]
    num_groups, num_tiles = part.width // part.group, triton.cdiv(num_tokens, tokens)
    wanted = min(programs * rows // num_rows, num_groups // 4) if may_split else 1
    splits = 1 << (max(1, wanted).bit_length() - 1)
    padded = max(16, triton.next_power_of_2(triton.cdiv(num_groups, splits)))
    out = _empty(x, num_rows, splits)
    _project_few[(num_tiles, triton.cdiv(num_rows, rows), splits)](
        states.codes, states.sums, states.sums if states.scales is None else states.scales, part.codes, part.scales,
        x if part.bias is None else part.bias, out, num_tokens, num_rows, part.width, part.group,
        tokens, rows, splits, num_parts, padded, part.bias is not None, stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


_FEW = {16: (64, 4, 4, 264), 32: (64, 4, 4, 264), 64: (128, 4, 3, 264), 128: (64, 4, 4, 264)}
"""By columns of a tile, each a part of a state: rows, warps, stages, and programs that the columns of the weights are
split for, multiples of the 132 multiprocessors of an H200. Measured on one."""


def _empty(x: Tensor, num_rows: int, splits: int) -> Tensor:
    if splits == 1:
        return x.new_empty(len(x), num_rows)
    return torch.empty(len(x), splits, num_rows, dtype=torch.float32, device=x.device)


def _unpacked(part: Packed, dtype: torch.dtype) -> Tensor:
    out = torch.empty(part.num_rows, part.width, dtype=dtype, device=part.codes.device)
    num_groups, block = part.scales.numel(), _UNPACKED_BYTES * 2 // part.group
    _unpack[(triton.cdiv(num_groups, block),)](
        part.codes, part.scales, out, num_groups, part.group, block,
        num_warps=4, **OVERLAPPING,
    )  # fmt: skip
    return out


_UNPACKED_BYTES = 2048
"""Bytes of codes per program of the kernel that unpacks."""
