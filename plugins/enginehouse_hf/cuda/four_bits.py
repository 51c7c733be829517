"""Products with weights of four bits, which are unpacked in registers.

One token: its numbers are rounded to 16 bits, relative to the largest of 32 columns, and multiplied with the codes as
integers, four products per instruction. More: the codes are the left operand of the tensor cores, which may be in
registers, as e4m3 numbers for states that are split (see ``split_states.py``), otherwise as numbers of the model's
type. What is subtracted from the codes of a group is multiplied with the sum of its states instead, and its factors are
applied to its sum. For more than ``MAX_TILES`` tokens weights are unpacked in memory, for cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.layers import activate, load_inside
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.split_states import split_states
from enginehouse_hf.cuda.structure import Activation
from enginehouse_hf.packed import MAX_TILES, Packed, rounds_states

__all__ = ["project_four_bits"]


def _multiply() -> str:
    """Assembly: 16 times the sum of products of the 32 codes in four words and numbers of 16 bits.

    The numbers are given as words of four low or high bytes: low bytes of the columns in the lower halves of the codes'
    bytes, then their high bytes, then both of the columns in the upper halves.
    """
    lines = [".reg .b32 a, b, p, q, r, s;", "mov.b32 p, 0; mov.b32 q, 0; mov.b32 r, 0; mov.b32 s, 0;"]
    for word in range(1, 5):
        lines += [
            f"and.b32 a, ${word}, 0x0F0F0F0F; and.b32 b, ${word}, 0xF0F0F0F0;",
            f"dp4a.u32.u32 p, a, ${word + 4}, p; dp4a.u32.s32 q, a, ${word + 8}, q;",
            f"dp4a.u32.u32 r, b, ${word + 12}, r; dp4a.u32.s32 s, b, ${word + 16}, s;",
        ]
    lines += ["shl.b32 q, q, 8; add.s32 p, p, q; shl.b32 s, s, 8; add.s32 r, r, s; shl.b32 p, p, 4; add.s32 $0, p, r;"]
    return "{" + "\n".join(lines) + "}"


_MULTIPLY = tl.constexpr(_multiply())
_MULTIPLY_OPERANDS = tl.constexpr("=r" + 20 * ",r")

_GATHER = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $2, $3, 0x5410; prmt.b32 b, $4, $5, 0x5410;"
    "prmt.b32 $0, a, b, 0x6420; prmt.b32 $1, a, b, 0x7531;}"
)
"""Assembly: the lowest bytes of four words as one, and the bytes above them."""


@triton.jit
def _fourths(x):
    """Return every fourth number of all, from the first, second, third and fourth on, one axis."""
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _bytes(x):
    """Return the low bytes of columns, (N, 16), as four words of N each, and their high bytes."""
    first, second, third, fourth = _fourths(x)
    low, high = tl.inline_asm_elementwise(
        _GATHER, "=r,=r,r,r,r,r", [first, second, third, fourth], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return _fourths(low), _fourths(high)


@triton.jit
def _rounded(x, factor):
    """Round ``x * factor`` to integers of 16 bits; 0x4B400000 is added to them."""
    return (x * factor + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _project_single(
    x, codes, factors, bias, out, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    # A unit is four words of a row: columns whose states are rounded with one factor.
    kind = x.dtype.element_ty
    OWN: tl.constexpr = WIDTH // 32 // SPLITS
    PARTS: tl.constexpr = 1 if KIND is None else 2
    split, index = tl.program_id(1), tl.arange(0, PARTS * ROWS)
    first = tl.program_id(0) * ROWS + index % ROWS
    is_row = first < num_rows
    rows = tl.where(is_row, first + index // ROWS * num_rows, 0).to(tl.int64)  # of the gate, then of the other factor
    shape: tl.constexpr = [PARTS * ROWS, UNITS]
    sums = tl.zeros(shape, tl.float32)
    for start in tl.static_range(0, OWN, UNITS):
        word = start * 4 + tl.arange(0, UNITS * 4)
        at_codes = codes + rows[:, None] * (WIDTH // 8) + (split * OWN * 4 + word)[None, :]
        words = load_inside(at_codes, (word < OWN * 4)[None, :], OWN % UNITS == 0, "evict_first")
        unit = start + tl.arange(0, UNITS)
        is_unit = (unit < OWN)[:, None]
        unit += split * OWN
        at_factors = factors + (unit * 32 // GROUP)[:, None] + rows[None, :] * (WIDTH // GROUP)
        given = tl.trans(load_inside(at_factors, is_unit, OWN % UNITS == 0, ""))
        if start == 0:
            await_previous()
        at_x = x + unit[:, None] * 32 + tl.arange(0, 16)[None, :]
        lower = load_inside(at_x, is_unit, OWN % UNITS == 0, "").to(tl.float32)
        upper = load_inside(at_x + 16, is_unit, OWN % UNITS == 0, "").to(tl.float32)
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(lower), tl.abs(upper)), 1), 1e-30)
        inverse = (32767.0 / largest)[:, None]
        lower, upper = _rounded(lower, inverse), _rounded(upper, inverse)
        total = tl.sum(lower + upper + 0x69800000, 1).to(tl.float32)  # minus twice 0x4B400000, modulo 2**32
        a, b = _bytes(lower)
        c, d = _bytes(upper)
        w0, w1, w2, w3 = _fourths(words)
        operands = [
            tl.reshape(w0, shape), tl.reshape(w1, shape), tl.reshape(w2, shape), tl.reshape(w3, shape),
            a[0][None, :], a[1][None, :], a[2][None, :], a[3][None, :],
            b[0][None, :], b[1][None, :], b[2][None, :], b[3][None, :],
            c[0][None, :], c[1][None, :], c[2][None, :], c[3][None, :],
            d[0][None, :], d[1][None, :], d[2][None, :], d[3][None, :],
        ]  # fmt: skip
        part = tl.inline_asm_elementwise(_MULTIPLY, _MULTIPLY_OPERANDS, operands, dtype=tl.int32, is_pure=True, pack=1)
        part = part.to(tl.float32) - (given & 255).to(tl.float32) * (total * 16.0)[None, :]
        sums += part * (given & -256).to(tl.float32, bitcast=True) * (largest / (32767.0 * 16.0))[None, :]
    result = tl.sum(sums, 1)
    if KIND is None:
        if HAS_BIAS:
            added = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
            result += tl.where(split == 0, added, 0.0)
        tl.store(out + split * num_rows + rows, result.to(out.dtype.element_ty), mask=is_row)
    else:
        gate, up = tl.split(tl.trans(tl.reshape(result, [2, ROWS])))
        active = activate(gate.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(out + row, (active * up.to(kind).to(tl.float32)).to(kind), mask=row < num_rows)


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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    split = tl.program_id(1)
    column = tl.program_id(2) * TOKENS * PARTS + tl.arange(0, TOKENS * PARTS)  # the parts of each token in turn
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
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
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


def project_four_bits(x: Tensor, part: Packed, activation: Activation | None, may_split: bool) -> Tensor:
    """See :func:`enginehouse_hf.cuda.packed.project_packed`."""
    if len(x) == 1:
        return _single(x, part, activation, may_split)
    assert activation is None
    if len(x) <= MAX_TILES and x.dtype != torch.float32:
        return _few(x, part, may_split)
    return linear(x, _unpacked(part, x.dtype), part.bias)


_MANY_ROWS = 16_384
"""Output rows that need no split of the columns."""


def _single(x: Tensor, part: Packed, activation: Activation | None, may_split: bool) -> Tensor:
    num_rows = part.num_rows // (1 if activation is None else 2)
    rows, units, warps = _SINGLE["many" if activation is not None or num_rows >= _MANY_ROWS else "few"]
    num_units = part.width // 32
    counts = [n for n in range(1, 9) if num_units % (n * units) == 0] if may_split and num_rows < _MANY_ROWS else []
    splits = max(counts, default=1)
    out = _empty(x, num_rows, splits)
    rows = rows // (1 if activation is None else 2)
    _project_single[(triton.cdiv(num_rows, rows), splits)](
        x, part.codes.view(torch.int32), part.scales, x if part.bias is None else part.bias, out, num_rows, part.width,
        part.group, rows, units, splits, part.bias is not None, activation, num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    return out


_SINGLE = {"many": (16, 32, 1), "few": (16, 64, 2)}
"""Rows, units of columns per turn, and warps, for many rows and few. Measured on an H200."""


def _few(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    states = split_states(x, part.group, 1 if rounds_states(x, part) else 2)
    num_tokens, num_rows, num_parts = len(x), part.num_rows, states.num_parts
    tokens = max(16 // num_parts, min(128 // num_parts, triton.next_power_of_2(num_tokens)))
    rows, warps, stages, programs = _FEW[tokens * num_parts]
    num_groups = part.width // part.group
    splits = 1 << (max(1, min(programs * rows // num_rows, num_groups // 4) if may_split else 1).bit_length() - 1)
    padded = max(16, triton.next_power_of_2(triton.cdiv(num_groups, splits)))
    out = _empty(x, num_rows, splits)
    _project_few[(triton.cdiv(num_rows, rows), splits, triton.cdiv(num_tokens, tokens))](
        states.codes, states.sums, states.sums if states.scales is None else states.scales, part.codes, part.scales,
        x if part.bias is None else part.bias, out, num_tokens, num_rows, part.width, part.group,
        tokens, rows, splits, num_parts, padded, part.bias is not None, stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


_FEW = {16: (64, 4, 4, 264), 32: (64, 4, 4, 264), 64: (64, 4, 3, 264), 128: (64, 4, 3, 132)}
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
