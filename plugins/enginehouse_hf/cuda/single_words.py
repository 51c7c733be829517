"""Products of one token with weights of four and eight bits, called by ``packed.py``.

A unit is four words of a row. The lane that reads a unit also reads the states of its columns, so that nothing is
exchanged between lanes before the sum. FP8 is multiplied in float32; integers of four and eight bits as integers, four
products per instruction, by states that are rounded to 16 bits relative to the largest of a unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.layers import activate, load_inside
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.structure import Activation
from enginehouse_hf.packed import Packed

__all__ = ["has_words", "project_words"]

_HAS_ASSEMBLY = tl.constexpr(torch.cuda.is_available())


def _multiply_floats() -> str:
    """Assembly: a float32 number plus the products of the 16 e4m3 numbers in four words and 16 float32 numbers."""
    lines = [".reg .b16 low, high; .reg .b32 both; .reg .f16 a, b; .reg .f32 p, q, c, d; mov.f32 p, $21;"]
    for word in range(4):
        lines.append(f"mov.b32 {{low, high}}, ${word + 1};")
        for index, half in enumerate(("low", "high")):
            at = 5 + 4 * word + 2 * index
            lines.append(
                f"cvt.rn.f16x2.e4m3x2 both, {half}; mov.b32 {{a, b}}, both; cvt.f32.f16 c, a; cvt.f32.f16 d, b;"
            )
            is_first = word == index == 0
            lines.append(f"fma.rn.f32 p, c, ${at}, p;")
            lines.append(f"mul.f32 q, d, ${at + 1};" if is_first else f"fma.rn.f32 q, d, ${at + 1}, q;")
    return "{" + "\n".join([*lines, "add.f32 $0, p, q;"]) + "}"


def _multiply_bytes() -> str:
    """Assembly: the sum of products of the 16 signed bytes in four words and numbers of 16 bits.

    The numbers are given as four words of low bytes, then four of high bytes.
    """
    lines = [".reg .b32 p, q; mov.b32 p, 0; mov.b32 q, 0;"]
    lines += [f"dp4a.s32.u32 p, ${k}, ${k + 4}, p; dp4a.s32.s32 q, ${k}, ${k + 8}, q;" for k in range(1, 5)]
    return "{" + "\n".join([*lines, "shl.b32 q, q, 8; add.s32 $0, p, q;"]) + "}"


def _multiply_halves() -> str:
    """Assembly: 16 times the sum of products of the 32 codes in four words and numbers of 16 bits.

    The numbers are words of low bytes of the columns in the lower halves of the codes' bytes, of their high bytes, and
    both of the columns in the upper halves.
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


_FLOATS = tl.constexpr(_multiply_floats())
_BYTES = tl.constexpr(_multiply_bytes())
_HALVES = tl.constexpr(_multiply_halves())
_FLOATS_OPERANDS = tl.constexpr("=f" + 4 * ",r" + 17 * ",f")
_BYTES_OPERANDS = tl.constexpr("=r" + 12 * ",r")
_HALVES_OPERANDS = tl.constexpr("=r" + 20 * ",r")

_GATHER = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $2, $3, 0x5410; prmt.b32 b, $4, $5, 0x5410;"
    "prmt.b32 $0, a, b, 0x6420; prmt.b32 $1, a, b, 0x7531;}"
)
"""Assembly: the lowest bytes of four words as one, and the bytes above them."""


@triton.jit
def _fourths(x, shape: tl.constexpr):
    """Return every fourth number of all, from the first, second, third and fourth on, in ``shape``."""
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return tl.reshape(first, shape), tl.reshape(second, shape), tl.reshape(third, shape), tl.reshape(fourth, shape)


@triton.jit
def _floats(pair, kind: tl.constexpr):
    """The two numbers of 16 bits in a word, as float32."""
    if kind == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        return low.to(kind, bitcast=True).to(tl.float32), high.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _eight_states(at_x, PART: tl.constexpr, mask, UNITS: tl.constexpr, kind: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The eight states ``PART`` of each unit, whose first words are at ``at_x``: float32, (1, UNITS) each."""
    if kind == tl.float32:
        w0, w1, w2, w3 = _fourths(load_inside(at_x + 8 * PART, mask, IS_WHOLE, ""), [1, UNITS])
        w4, w5, w6, w7 = _fourths(load_inside(at_x + 8 * PART + 4, mask, IS_WHOLE, ""), [1, UNITS])
        a, b = w0.to(tl.float32, bitcast=True), w1.to(tl.float32, bitcast=True)
        c, d = w2.to(tl.float32, bitcast=True), w3.to(tl.float32, bitcast=True)
        e, f = w4.to(tl.float32, bitcast=True), w5.to(tl.float32, bitcast=True)
        g, h = w6.to(tl.float32, bitcast=True), w7.to(tl.float32, bitcast=True)
    else:
        w0, w1, w2, w3 = _fourths(load_inside(at_x + 4 * PART, mask, IS_WHOLE, ""), [1, UNITS])
        a, b = _floats(w0, kind)
        c, d = _floats(w1, kind)
        e, f = _floats(w2, kind)
        g, h = _floats(w3, kind)
    return a, b, c, d, e, f, g, h


@triton.jit
def _largest(x):
    """The largest of the absolute values of eight."""
    a = tl.maximum(tl.maximum(tl.abs(x[0]), tl.abs(x[1])), tl.maximum(tl.abs(x[2]), tl.abs(x[3])))
    b = tl.maximum(tl.maximum(tl.abs(x[4]), tl.abs(x[5])), tl.maximum(tl.abs(x[6]), tl.abs(x[7])))
    return tl.maximum(a, b)


@triton.jit
def _rounded(x, factor):
    """Round ``x * factor`` to an integer of 16 bits; 0x4B400000 is added to it."""
    return (x * factor + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _gathered(a, b, c, d):
    """Words of the low bytes and of the high bytes of four numbers of 16 bits."""
    if _HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            _GATHER, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)
    high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | (((d >> 8) & 255) << 24)
    return low, high


@triton.jit
def _rounded_words(x, factor):
    """Words of low bytes and of high bytes of eight states, and their sum as integers plus 8 times 0x4B400000."""
    a, b, c, d = _rounded(x[0], factor), _rounded(x[1], factor), _rounded(x[2], factor), _rounded(x[3], factor)
    e, f, g, h = _rounded(x[4], factor), _rounded(x[5], factor), _rounded(x[6], factor), _rounded(x[7], factor)
    low0, high0 = _gathered(a, b, c, d)
    low1, high1 = _gathered(e, f, g, h)
    return low0, low1, high0, high1, (a + b) + (c + d) + (e + f) + (g + h)


@triton.jit
def _plain_bytes(word, low, high, SIGNED: tl.constexpr):
    """What ``dp4a`` computes of a word of codes and four numbers of 16 bits."""
    total = word * 0
    for k in tl.static_range(4):
        code = (word << (24 - 8 * k)) >> 24
        if not SIGNED:
            code = code & 255
        number = ((low >> (8 * k)) & 255) + (((high << (24 - 8 * k)) >> 24) << 8)
        total += code * number
    return total


@triton.jit
def _sum_floats(w, x, y, total):
    """``total`` plus sums of products of 16 e4m3 numbers in four words with ``x`` and ``y``, eight each."""
    if _HAS_ASSEMBLY:
        operands = [w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
                    y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], total]  # fmt: skip
        return tl.inline_asm_elementwise(_FLOATS, _FLOATS_OPERANDS, operands, dtype=tl.float32, is_pure=True, pack=1)
    for k in tl.static_range(4):
        for i in tl.static_range(4):
            code = ((w[k] >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            total += code * (x[4 * k + i] if k < 2 else y[4 * k - 8 + i])
    return total


@triton.jit
def _sum_bytes(w, a, b):
    """Sums of products of 16 signed bytes in four words with rounded states."""
    if _HAS_ASSEMBLY:
        operands = [w[0], w[1], w[2], w[3], a[0], a[1], b[0], b[1], a[2], a[3], b[2], b[3]]
        return tl.inline_asm_elementwise(_BYTES, _BYTES_OPERANDS, operands, dtype=tl.int32, is_pure=True, pack=1)
    first = _plain_bytes(w[0], a[0], a[2], True) + _plain_bytes(w[1], a[1], a[3], True)
    return first + _plain_bytes(w[2], b[0], b[2], True) + _plain_bytes(w[3], b[1], b[3], True)


@triton.jit
def _sum_halves(w, a, b, c, d):
    """16 times the sums of products of 32 codes in four words with rounded states."""
    if _HAS_ASSEMBLY:
        operands = [w[0], w[1], w[2], w[3], a[0], a[1], b[0], b[1], a[2], a[3], b[2], b[3],
                    c[0], c[1], d[0], d[1], c[2], c[3], d[2], d[3]]  # fmt: skip
        return tl.inline_asm_elementwise(_HALVES, _HALVES_OPERANDS, operands, dtype=tl.int32, is_pure=True, pack=1)
    low: tl.constexpr = 0x0F0F0F0F
    first = _plain_bytes(w[0] & low, a[0], a[2], False) + _plain_bytes(w[1] & low, a[1], a[3], False)
    first += _plain_bytes(w[2] & low, b[0], b[2], False) + _plain_bytes(w[3] & low, b[1], b[3], False)
    second = _plain_bytes((w[0] >> 4) & low, c[0], c[2], False) + _plain_bytes((w[1] >> 4) & low, c[1], c[3], False)
    second += _plain_bytes((w[2] >> 4) & low, d[0], d[2], False) + _plain_bytes((w[3] >> 4) & low, d[1], d[3], False)
    return (first + second) * 16


@triton.jit
def _store_rows(
    result, rows, is_row, split, bias, out, num_rows,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Store rows of a product; or those of a gate, activated, times those of the other factor, which follow them."""
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


@triton.jit
def _project_words(  # noqa: PLR0915
    x, codes, factors, bias, out, num_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 32 if FORM == "tiles" else 16  # of a unit
    STATE_WORDS: tl.constexpr = COLUMNS if kind == tl.float32 else COLUMNS // 2
    OWN: tl.constexpr = WIDTH // COLUMNS // SPLITS
    IS_WHOLE: tl.constexpr = OWN % UNITS == 0
    IS_GROUPED: tl.constexpr = GROUP < WIDTH or FORM == "tiles"
    PARTS: tl.constexpr = 1 if KIND is None else 2
    split, index = tl.program_id(1), tl.arange(0, PARTS * ROWS)
    first = tl.program_id(0) * ROWS + index % ROWS
    is_row = first < num_rows
    rows = tl.where(is_row, first + index // ROWS * num_rows, 0).to(tl.int64)  # of the gate, then of the other factor
    shape: tl.constexpr = [PARTS * ROWS, UNITS]
    sums = tl.zeros(shape, tl.float32)
    for start in tl.static_range(0, OWN, UNITS):
        place = tl.arange(0, UNITS * 4)
        word = split * OWN * 4 + start * 4 + place
        inside = start * 4 + place < OWN * 4
        at_codes = codes + rows[:, None] * (WIDTH // COLUMNS * 4) + word[None, :]
        words = load_inside(at_codes, inside[None, :], IS_WHOLE, "evict_first")
        unit = start + tl.arange(0, UNITS)
        if IS_GROUPED:
            at_factors = factors + ((split * OWN + unit) * COLUMNS // GROUP)[:, None] + rows[None, :] * (WIDTH // GROUP)
            given = tl.trans(load_inside(at_factors, (unit < OWN)[:, None], IS_WHOLE, ""))
        if start == 0:
            await_previous()
        w = _fourths(words, shape)
        at_x = x + (split * OWN + start + place // 4) * STATE_WORDS + place % 4
        s0 = _eight_states(at_x, 0, inside, UNITS, kind, IS_WHOLE)
        s1 = _eight_states(at_x, 1, inside, UNITS, kind, IS_WHOLE)
        if FORM == "fp8" and IS_GROUPED:
            sums += _sum_floats(w, s0, s1, tl.zeros(shape, tl.float32)) * given.to(tl.float32)
        elif FORM == "fp8":
            sums = _sum_floats(w, s0, s1, sums)
        elif FORM == "bytes":
            largest = tl.maximum(tl.maximum(_largest(s0), _largest(s1)), 1e-30)
            inverse = 32767.0 / largest
            a, b = _rounded_words(s0, inverse), _rounded_words(s1, inverse)
            sums += _sum_bytes(w, a, b).to(tl.float32) * (largest / 32767.0)
        else:
            s2 = _eight_states(at_x, 2, inside, UNITS, kind, IS_WHOLE)
            s3 = _eight_states(at_x, 3, inside, UNITS, kind, IS_WHOLE)
            largest = tl.maximum(tl.maximum(_largest(s0), _largest(s1)), tl.maximum(_largest(s2), _largest(s3)))
            largest = tl.maximum(largest, 1e-30)
            inverse = 32767.0 / largest
            a, b = _rounded_words(s0, inverse), _rounded_words(s1, inverse)
            c, d = _rounded_words(s2, inverse), _rounded_words(s3, inverse)
            total = (a[4] + b[4] + c[4] + d[4] - 0x68000000).to(tl.float32)  # 32 times 0x4B400000, modulo 2**32
            part = _sum_halves(w, a, b, c, d).to(tl.float32) - (given & 255).to(tl.float32) * (total * 16.0)
            sums += part * (given & -256).to(tl.float32, bitcast=True) * (largest / (32767.0 * 16.0))
    result = tl.sum(sums, 1)
    if not IS_GROUPED:
        result *= tl.load(factors + rows).to(tl.float32)
    _store_rows(result, rows, is_row, split, bias, out, num_rows, ROWS, HAS_BIAS, KIND, kind)


def has_words(part: Packed) -> bool:
    """True if :func:`project_words` multiplies these weights: units are whole, and have one factor each."""
    columns = _columns(part)
    return part.width % columns == 0 and part.group % columns == 0 and (part.form != "int8" or part.group == part.width)


def project_words(x: Tensor, part: Packed, activation: Activation | None, may_split: bool) -> Tensor:
    """See :func:`enginehouse_hf.cuda.packed.project_packed`; for one token. What is activated is never split."""
    num_rows = part.num_rows // (1 if activation is None else 2)
    num_units = part.width // _columns(part)
    size = "usual"
    if may_split and activation is None and num_rows < _MANY_ROWS:
        size = "wide" if part.width >= _WIDE else "split"
    rows, units, warps, splits = _SIZES["tiles" if part.form == "tiles" else "bytes"][size]
    splits = splits if num_units % splits == 0 else 1
    rows = rows // (1 if activation is None else 2)
    out = x.new_empty(1, num_rows)
    if splits > 1:
        out = torch.empty(1, splits, num_rows, dtype=torch.float32, device=x.device)
    _project_words[(triton.cdiv(num_rows, rows), splits)](
        x.view(torch.int32), part.codes.view(torch.int32), part.scales, x if part.bias is None else part.bias, out,
        num_rows, part.width, part.group, rows, min(units, triton.next_power_of_2(num_units)), splits,
        part.bias is not None, activation, "bytes" if part.form == "int8" else part.form, _TYPES[x.dtype],
        num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    return out


def _columns(part: Packed) -> int:
    """Columns of a unit."""
    return 32 if part.form == "tiles" else 16


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_MANY_ROWS = 16_384
"""Output rows that need no split of the columns."""

_WIDE = 8192
"""Columns from which on a split is worth more than more rows per program."""

_SIZES = {
    "bytes": {"usual": (4, 128, 4, 1), "split": (4, 128, 4, 1), "wide": (8, 64, 4, 2)},
    "tiles": {"usual": (8, 64, 2, 1), "split": (16, 64, 2, 2), "wide": (8, 64, 2, 2)},
}
"""Rows of a program, units per turn, warps and splits: in general, where the columns may be split, and for long rows.

Measured on an H200 with the shapes of Llama-3.1-8B: those of the least time among seven of each.
"""
