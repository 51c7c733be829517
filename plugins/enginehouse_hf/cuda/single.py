"""Products of one token with the weights of its experts, plain or of few bits: matrix times vector, on ordinary cores.

Called by ``grouped.py``. Plain weights and FP8 are multiplied in float32. For weights of four bits that would take
longer than reading them: the numbers of the token are rounded to 16 bits, relative to the largest of a group of
columns, and multiplied as integers, four products of a byte per instruction; weights of MXFP4 become bytes by a table
in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from enginehouse_hf.cuda.layers import activate
from enginehouse_hf.cuda.overlap import await_previous

__all__ = ["expert_rows", "gate_and_up", "multiply_single"]

_GATHER = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $2, $3, 0x5410; prmt.b32 b, $4, $5, 0x5410;"
    "prmt.b32 $0, a, b, 0x6420; prmt.b32 $1, a, b, 0x7531;}"
)
"""Assembly: the lowest bytes of four words as one, and the bytes above them."""

_PRODUCTS = (
    "dp4a.u32.u32 l, u, $2, 0; dp4a.u32.s32 h, u, $3, 0;",
    "dp4a.u32.u32 l, u, $4, l; dp4a.u32.s32 h, u, $5, h; shl.b32 h, h, 8; add.s32 $0, l, h;",
)
"""Assembly: add products of four bytes and four numbers, of which low and high bytes are given."""

_INTEGERS = tl.constexpr(
    "{.reg .b32 u, l, h; and.b32 u, $1, 0x0F0F0F0F;"
    f"{_PRODUCTS[0]} shr.u32 u, $1, 4; and.b32 u, u, 0x0F0F0F0F; {_PRODUCTS[1]}}}"
)
"""Assembly: the sum of products of the codes of a word and numbers, given for the codes 0, 2, 4, 6, then the others."""

_FLOATS = tl.constexpr(
    "{.reg .b32 a, b, c, d, n, p, q, u, l, h;"
    "mov.b32 a, 0x13121110; mov.b32 b, 0x1C181614; mov.b32 c, 0x0D0E0F10; mov.b32 d, 0x04080A0C;"
    f"xor.b32 n, $1, 0x88888888; prmt.b32 p, a, b, $1; prmt.b32 q, c, d, n; or.b32 u, p, q; {_PRODUCTS[0]}"
    f"shr.u32 p, $1, 16; shr.u32 n, n, 16; prmt.b32 p, a, b, p; prmt.b32 q, c, d, n; or.b32 u, p, q; {_PRODUCTS[1]}}}"
)
"""Assembly: the same for e2m1 codes 0 to 3, then the others, each as twice its number plus 16.

Of the tables of positive and negative numbers, one gives zero: a set highest bit of a selector repeats the sign.
"""


@triton.jit
def _rounded(x, factor):
    """Round ``x * factor`` to integers of 16 bits; 0x4B400000 is added to them."""
    return (x * factor + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _gathered(a, b, c, d):
    """Words of the low bytes and of the high bytes of four numbers of 16 bits."""
    return tl.inline_asm_elementwise(
        _GATHER, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _sum_words(at_x, word, offset, inside, LANES: tl.constexpr, IS_FLOAT: tl.constexpr):
    """(ROWS, GROUPS) sums of products of (ROWS, GROUPS, LANES) words of codes with the columns at ``at_x``.

    ``offset`` is subtracted from the codes. The numbers of MXFP4 count twice.
    """
    inside = inside[:, None]
    x0 = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(at_x + LANES, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at_x + 2 * LANES, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(at_x + 3 * LANES, mask=inside, other=0.0).to(tl.float32)
    x4 = tl.load(at_x + 4 * LANES, mask=inside, other=0.0).to(tl.float32)
    x5 = tl.load(at_x + 5 * LANES, mask=inside, other=0.0).to(tl.float32)
    x6 = tl.load(at_x + 6 * LANES, mask=inside, other=0.0).to(tl.float32)
    x7 = tl.load(at_x + 7 * LANES, mask=inside, other=0.0).to(tl.float32)
    highest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    others = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    largest = tl.maximum(tl.max(tl.maximum(highest, others), 1), 1e-30)
    factor = (32767.0 / largest)[:, None]
    x0, x1, x2, x3 = _rounded(x0, factor), _rounded(x1, factor), _rounded(x2, factor), _rounded(x3, factor)
    x4, x5, x6, x7 = _rounded(x4, factor), _rounded(x5, factor), _rounded(x6, factor), _rounded(x7, factor)
    total = tl.sum((x0 + x1) + (x2 + x3) + (x4 + x5) + (x6 + x7) - 0x5A000000, 1).to(tl.float32)  # 8 times, modulo 2^32
    if IS_FLOAT:
        a, b = _gathered(x0, x1, x2, x3)
        c, d = _gathered(x4, x5, x6, x7)
        operands = [word, a[None, :, :], b[None, :, :], c[None, :, :], d[None, :, :]]
        part = tl.inline_asm_elementwise(_FLOATS, "=r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)
    else:
        a, b = _gathered(x0, x2, x4, x6)
        c, d = _gathered(x1, x3, x5, x7)
        operands = [word, a[None, :, :], b[None, :, :], c[None, :, :], d[None, :, :]]
        part = tl.inline_asm_elementwise(_INTEGERS, "=r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)
    return (tl.sum(part, 2).to(tl.float32) - offset * total[None, :]) * (largest / 32767.0)[None, :]


@triton.jit
def expert_rows(expert, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, IN_TURN: tl.constexpr):
    """Rows of this program in the weights of all experts; with ``IN_TURN`` one of the first half, one of the second.

    Those after the last are that one, so that nothing has to be masked but the results.
    """
    index = tl.arange(0, ROWS)
    if IN_TURN:
        place = tl.minimum(tl.program_id(0) * (ROWS // 2) + index // 2, NUM_ROWS // 2 - 1)
        row = index % 2 * (NUM_ROWS // 2) + place
    else:
        row = tl.minimum(tl.program_id(0) * ROWS + index, NUM_ROWS - 1)
    return expert.to(tl.int64) * NUM_ROWS + row


@triton.jit
def gate_and_up(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, kind: tl.constexpr):
    """The activation of rounded products, in float32, rounded."""
    if KIND == "clamped":
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = tl.minimum(gate, LIMIT)
        return (up * gate / (1.0 + tl.exp(-ALPHA * gate))).to(kind)
    return (activate(gate, KIND).to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def multiply_single(
    x, codes, scales, zeros, bias, ids, weights, out,
    WIDTH: tl.constexpr, NUM_ROWS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    FORM: tl.constexpr, IS_GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, ALTERNATES: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert, see ``grouped.py``; ``GROUPS`` groups of columns at once."""
    await_previous()
    kind: tl.constexpr = x.dtype.element_ty
    IN_WORDS: tl.constexpr = FORM == "int4" or FORM == "mxfp4"  # noqa: PLR1714 - not in this language
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    LANES: tl.constexpr = GROUP // 8 if IN_WORDS else GROUP
    choice = tl.program_id(1)
    row = expert_rows(tl.load(ids + choice), NUM_ROWS, ROWS, KIND is not None and not ALTERNATES)
    lane = tl.arange(0, LANES)
    if KIND is None:
        x += choice * WIDTH
    sums = tl.zeros([ROWS, GROUPS] if IN_WORDS else [ROWS, GROUPS, LANES], tl.float32)
    for first in tl.static_range(0, NUM_GROUPS, GROUPS):
        group = first + tl.arange(0, GROUPS)
        inside = group < NUM_GROUPS
        at_group = row[:, None] * NUM_GROUPS + group[None, :]
        at_codes = codes + (at_group * LANES)[:, :, None] + lane[None, None, :]
        code = tl.load(at_codes, mask=inside[None, :, None], other=0, eviction_policy="evict_first")
        at_x = x + (group * GROUP)[:, None] + lane[None, :]
        if IS_GROUPED:
            scale = tl.load(scales + at_group, mask=inside[None, :], other=0)
        if FORM == "mxfp4":
            power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            sums += _sum_words(at_x, code, 16.0, inside, LANES, True) * (power * 0.5)
        elif FORM == "int4":
            zero = tl.load(zeros + at_group, mask=inside[None, :], other=0).to(tl.float32) if HAS_ZEROS else 8.0
            sums += _sum_words(at_x, code, zero, inside, LANES, False) * scale.to(tl.float32)
        else:
            if FORM == "fp8":
                code = code.to(tl.float8e4nv, bitcast=True)
            value = tl.load(at_x, mask=inside[:, None], other=0.0).to(tl.float32)
            part = code.to(tl.float32) * value[None, :, :]
            sums += part * scale[:, :, None] if IS_GROUPED else part
    result = tl.sum(sums if IN_WORDS else tl.sum(sums, 2), 1)
    if FORM == "fp8" and not IS_GROUPED:
        result *= tl.load(scales + row).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if KIND is None:
        column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        result = (result * tl.load(weights + choice)).to(kind)
        tl.store(out + choice * NUM_ROWS + column, result, mask=column < NUM_ROWS)
    else:
        gate, up = tl.split(tl.reshape(result.to(kind).to(tl.float32), [ROWS // 2, 2]))
        column = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        active = gate_and_up(gate, up, KIND, ALPHA, LIMIT, kind)
        tl.store(out + choice * (NUM_ROWS // 2) + column, active, mask=column < NUM_ROWS // 2)
