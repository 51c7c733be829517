"""Products of tokens with the weights of their experts, plain or of few bits, which are unpacked in registers.

Called by ``experts.py``, which sorts the pairs of token and expert. One kernel serves both weights of an expert: the
joint one of gate and up, with the activation, and the one back to the states. Weights of four bits and FP8 become
numbers of the model's type, exactly: those of MXFP4 with their factors, which are powers of two; other factors are
applied to the sum of their group. Groups of four bits below 128 columns are rounded to the model's type instead. One
token is left to ``single.py``, but for four bits in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.single import expert_rows, gate_and_up, multiply_single
from enginehouse_hf.cuda.split_states import SplitStates, split_states
from enginehouse_hf.cuda.structure import Activation, Clamped, Linear, Projection
from enginehouse_hf.packed import has_tensor_cores_of_8_bits

__all__ = ["Pairs", "multiply"]

_HAS_ASSEMBLY = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))


def _halves(k: int) -> str:
    """Assembly: into ``t`` the 16 bits of two words that hold their four-bit codes number ``k``."""
    return f"prmt.b32 t, $1, $2, {'0x5410' if k < 4 else '0x7632'};"


def _integer_pair(k: int) -> str:
    """Assembly: the codes number ``k`` of two words, each added to 128, as a pair of bfloat16 numbers."""
    moved = f"shr.u32 t, t, {4 * (k % 4)};" if k % 4 else ""
    return f"{{.reg .b32 t; {_halves(k)} {moved} lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;}}"


def _float_pair(k: int) -> str:
    """Assembly: the e2m1 codes number ``k`` of two words as a pair of bfloat16 numbers, times a pair of factors.

    A code is the sign, the lowest two bits of the exponent and the highest of the mantissa: the number times 2^-126.
    """
    moved = f"shl.b32 t, t, {12 - 4 * (k % 4)};" if k % 4 < 3 else ""
    return (
        f"{{.reg .b32 t, u; {_halves(k)} {moved} shr.u32 u, t, 6; and.b32 u, u, 0x01C001C0; "
        "lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.bf16x2 $0, t, $3;}"
    )


def _fp8_pair(out: int, selector: str) -> str:
    """Assembly: two of four e4m3 codes as a pair of bfloat16 numbers: their bits, moved, times 2^120."""
    return (
        f"prmt.b32 t, $2, 0, {selector}; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; "
        f"lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.bf16x2 ${out}, t, f;"
    )


_INTEGER_PAIRS = tl.constexpr(tuple(_integer_pair(k) for k in range(8)))
_FLOAT_PAIRS = tl.constexpr(tuple(_float_pair(k) for k in range(8)))
_FP8_PAIRS = tl.constexpr(
    f"{{.reg .b32 t, u, f; mov.b32 f, 0x7B807B80; {_fp8_pair(0, '0x1404')} {_fp8_pair(1, '0x3424')}}}"
)


@triton.jit
def _unpack_fp8(code, kind: tl.constexpr):
    """Numbers of e4m3 codes, uint8."""
    if kind == tl.bfloat16 and _HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(_FP8_PAIRS, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return code.to(tl.float8e4nv, bitcast=True).to(kind)


@triton.jit
def _unpack_integer(word, zero, k: tl.constexpr, kind: tl.constexpr):
    """The codes number ``k`` of words, minus ``zero``, for 16-bit kinds; both have a number added that cancels."""
    if kind == tl.bfloat16 and _HAS_ASSEMBLY:
        code = tl.inline_asm_elementwise(_INTEGER_PAIRS[k], "=r,r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif kind == tl.bfloat16:
        code = (((word >> (4 * k)) & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        code = (((word >> (4 * k)) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return code - zero


@triton.jit
def _unpack_float(word, factor, k: tl.constexpr, kind: tl.constexpr):
    """The e2m1 codes number ``k`` of words, times factors of their groups from :func:`_factor`."""
    if kind == tl.bfloat16 and _HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            _FLOAT_PAIRS[k], "=r,r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    bits = ((word << (28 - 4 * k)) >> 6) & -2118123520  # 0x81C00000: sign, lowest of the exponent, highest of the rest
    return (bits.to(tl.float32, bitcast=True) * factor.to(tl.float32)).to(kind)


@triton.jit
def _factor(exponent):
    """2^(exponent - 127), times 2^126, which the bits of e2m1 codes lack."""
    return ((exponent.to(tl.int32) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _unpack(word, scale, zero, k: tl.constexpr, FORM: tl.constexpr, IS_WHOLE: tl.constexpr, kind: tl.constexpr):
    """The weights number ``k`` of words; with ``IS_WHOLE`` without their factors."""
    if IS_WHOLE:
        return _unpack_integer(word, zero, k, kind)
    elif FORM == "mxfp4":
        return _unpack_float(word, scale, k, kind)
    else:
        return ((((word >> (4 * k)) & 15).to(tl.float32) - zero) * scale.to(tl.float32)).to(kind)


@triton.jit
def _quarter(word, scale, zero, k: tl.constexpr, FORM: tl.constexpr, IS_WHOLE: tl.constexpr, kind: tl.constexpr):
    """The weights number ``k`` and the next one."""
    return tl.join(
        _unpack(word, scale, zero, k, FORM, IS_WHOLE, kind), _unpack(word, scale, zero, k + 1, FORM, IS_WHOLE, kind)
    )


@triton.jit
def _multiply_bytes(
    at_x, is_pair, codes, scales, row,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """(PAIRS, ROWS) products with plain or FP8 weights."""
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    sums = tl.zeros([PAIRS, ROWS], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        value = tl.load(at_x[:, None] + column[None, :], mask=is_pair[:, None] & inside[None, :], other=0.0)
        part = tl.load(codes + row[None, :] * WIDTH + column[:, None], mask=inside[:, None], other=0)
        if FORM == "fp8":
            part = _unpack_fp8(part, kind)
        if NUM_GROUPS > 1:
            scale = tl.load(scales + row * NUM_GROUPS + first // GROUP).to(tl.float32)
            sums += tl.dot(value, part, input_precision=PRECISION) * scale[None, :]
        else:
            sums = tl.dot(value, part, sums, input_precision=PRECISION)
    if FORM == "fp8" and NUM_GROUPS == 1:
        sums *= tl.load(scales + row).to(tl.float32)[None, :]
    return sums


@triton.jit
def _multiply_words(
    at_x, is_pair, codes, scales, zeros, row,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FORM: tl.constexpr, HAS_ZEROS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """(PAIRS, ROWS) products with weights of four bits, eight of them in a word."""
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    LANES: tl.constexpr = GROUP // 8
    WORDS: tl.constexpr = BLOCK // 8
    IS_WHOLE: tl.constexpr = FORM == "int4" and LANES % WORDS == 0 and kind != tl.float32  # a block has one factor
    IS_JOINED: tl.constexpr = PAIRS > 16 and WORDS % LANES == 0  # one product of many columns, in their order
    sums = tl.zeros([PAIRS, ROWS], tl.float32)
    for first in range(0, WIDTH // 8, WORDS):
        index = first + tl.arange(0, WORDS)
        inside = index < WIDTH // 8
        word = tl.load(codes + row[None, :] * (WIDTH // 8) + index[:, None], mask=inside[:, None], other=0)
        column = index // LANES * GROUP + index % LANES
        own = tl.zeros([PAIRS, ROWS], tl.float32) if IS_WHOLE else sums
        if IS_WHOLE:
            at_group = row * NUM_GROUPS + first // LANES
            scale = tl.load(scales + at_group).to(tl.float32)[None, :]
            zero = tl.load(zeros + at_group).to(tl.float32) if HAS_ZEROS else tl.zeros([ROWS], tl.float32) + 8.0
            zero = (zero + (128.0 if kind == tl.bfloat16 else 1024.0)).to(kind)[None, :]
        else:
            at_group = row[None, :] * NUM_GROUPS + (index // LANES)[:, None]
            scale = tl.load(scales + at_group, mask=inside[:, None], other=0)
            zero = tl.load(zeros + at_group, mask=inside[:, None], other=0).to(tl.float32) if HAS_ZEROS else 8.0
            if FORM == "mxfp4":
                scale = _factor(scale)
        if IS_JOINED:
            low = (
                _quarter(word, scale, zero, 0, FORM, IS_WHOLE, kind),
                _quarter(word, scale, zero, 2, FORM, IS_WHOLE, kind),
            )
            high = (
                _quarter(word, scale, zero, 4, FORM, IS_WHOLE, kind),
                _quarter(word, scale, zero, 6, FORM, IS_WHOLE, kind),
            )
            part = tl.join(tl.join(low[0], low[1]), tl.join(high[0], high[1]))
            part = tl.reshape(part, [WORDS // LANES, LANES, ROWS, 2, 2, 2])
            part = tl.reshape(tl.permute(part, (0, 5, 4, 3, 1, 2)), [BLOCK, ROWS])
            columns = first * 8 + tl.arange(0, BLOCK)
            mask = is_pair[:, None] & (columns < WIDTH)[None, :]
            value = tl.load(at_x[:, None] + columns[None, :], mask=mask, other=0.0)
            own = tl.dot(value, part, own, input_precision=PRECISION)
        else:
            for k in tl.static_range(8):
                at_value = at_x[:, None] + (column + k * LANES)[None, :]
                value = tl.load(at_value, mask=is_pair[:, None] & inside[None, :], other=0.0)
                part = _unpack(word, scale, zero, k, FORM, IS_WHOLE, kind)
                own = tl.dot(value, part, own, input_precision=PRECISION)
        sums = sums + own * scale if IS_WHOLE else own
    return sums


_SPLIT_FLOATS = tl.constexpr(
    "{.reg .b32 a, b; shl.b32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C; shl.b32 b, $2, 4;"
    "lop3.b32 $0, b, 0x80808080, a, 0xEA; shr.u32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C;"
    "lop3.b32 $1, $2, 0x80808080, a, 0xEA;}"
)
"""Assembly: the e2m1 codes in the lower and in the upper halves of four bytes as e4m3 numbers, times 2^-6."""


@triton.jit
def _multiply_group(byte, exponent, at_x, inside, sums, ROWS: tl.constexpr):
    """Add the product of 32 columns; ``inside`` is false after the last column of a row."""
    lower, upper = tl.inline_asm_elementwise(
        _SPLIT_FLOATS, "=&r,=r,r", [byte], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
    )
    weight = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), [ROWS, 32]).to(tl.float8e4nv, bitcast=True)
    value = tl.load(at_x, mask=inside, other=0.0)
    factor = (((exponent.to(tl.int32) & 255) + 6) << 23).to(tl.float32, bitcast=True)
    return sums + tl.dot(weight, value) * factor[:, None]


@triton.jit
def _exponents(scales, row, block, NUM_GROUPS: tl.constexpr):
    """Factors of four groups of MXFP4, two in each result."""
    at_pair = (scales + row * NUM_GROUPS).to(tl.pointer_type(tl.int16)) + 2 * block
    group = 4 * block + tl.zeros_like(row)
    return tl.load(at_pair, mask=group < NUM_GROUPS, other=0), tl.load(
        at_pair + 1, mask=group + 2 < NUM_GROUPS, other=0
    )


@triton.jit
def _multiply_split(
    x, x_scales, state, is_pair, codes, scales, row,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(PAIRS, ROWS) products of split states with weights of MXFP4, which are the left operand."""
    NUM_GROUPS: tl.constexpr = WIDTH // 32
    known = tl.where(is_pair, state, 0)
    both = tl.reshape(tl.join(2 * known, 2 * known + 1), [2 * PAIRS]).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    at_x = x + both[None, :] * WIDTH + lane
    byte_index = tl.arange(0, 64)
    at_codes = codes.to(tl.pointer_type(tl.uint8)) + row[:, None] * (WIDTH // 2) + byte_index[None, :]
    sums = tl.zeros([ROWS, 2 * PAIRS], tl.float32)
    next_low, next_high = _exponents(scales, row, 0, NUM_GROUPS)
    for block in tl.range(0, (NUM_GROUPS + 3) // 4, num_stages=STAGES):
        low, high = next_low, next_high
        next_low, next_high = _exponents(scales, row, block + 1, NUM_GROUPS)  # which are not pipelined, as too small
        byte = tl.load(at_codes + block * 64, mask=(block * 64 + byte_index < WIDTH // 2)[None, :], other=0)
        even, odd = tl.split(tl.permute(tl.reshape(byte, [ROWS, 2, 2, 16]), (0, 3, 1, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        column = block * 128 + lane
        sums = _multiply_group(first, low, at_x + block * 128, column < WIDTH, sums, ROWS)
        sums = _multiply_group(second, low >> 8, at_x + block * 128 + 32, column + 32 < WIDTH, sums, ROWS)
        sums = _multiply_group(third, high, at_x + block * 128 + 64, column + 64 < WIDTH, sums, ROWS)
        sums = _multiply_group(fourth, high >> 8, at_x + block * 128 + 96, column + 96 < WIDTH, sums, ROWS)
    high, low = tl.split(tl.reshape(sums, [ROWS, PAIRS, 2]))
    return tl.trans((high + low * 0.0625) * tl.load(x_scales + known)[None, :])


@triton.jit
def _multiply(
    x, x_scales, codes, scales, zeros, bias, ids, order, begins, weights, out,
    WIDTH: tl.constexpr, NUM_ROWS: tl.constexpr, GROUP: tl.constexpr, NUM_CHOSEN: tl.constexpr, STRIDE: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ALTERNATES: tl.constexpr,
    IS_SINGLE: tl.constexpr, IN_WORDS: tl.constexpr, IS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert; those of gate and up in turn if ``KIND`` names an activation."""
    await_previous()
    kind: tl.constexpr = out.dtype.element_ty
    expert = tl.program_id(1)
    if IS_SINGLE:
        begin, end = expert, expert + 1
        expert = tl.load(ids + begin)
    else:
        begin, end = tl.load(begins + expert), tl.load(begins + expert + 1)
    row = expert_rows(expert, NUM_ROWS, ROWS, KIND is not None and not ALTERNATES)
    for start in range(begin + tl.program_id(2) * PAIRS, end, PAIRS * tl.num_programs(2)):
        place = start + tl.arange(0, PAIRS)
        is_pair = place < end
        pair = place if IS_SINGLE else tl.load(order + place, mask=is_pair, other=0)
        state = place if KIND is None else pair // NUM_CHOSEN
        at_x = x + state.to(tl.int64) * WIDTH
        if IS_SPLIT:
            sums = _multiply_split(x, x_scales, state, is_pair, codes, scales, row, WIDTH, PAIRS, ROWS, STAGES)
        elif not IN_WORDS:
            sums = _multiply_bytes(
                at_x, is_pair, codes, scales, row, WIDTH, GROUP, PAIRS, ROWS, BLOCK, FORM, PRECISION, kind
            )
        else:
            sums = _multiply_words(
                at_x, is_pair, codes, scales, zeros, row, WIDTH, GROUP, PAIRS, ROWS, BLOCK, FORM, HAS_ZEROS,
                PRECISION, kind,
            )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias + row).to(tl.float32)[None, :]
        if KIND is None:
            share = tl.load(weights + pair, mask=is_pair, other=0.0)
            to = (pair // NUM_CHOSEN * STRIDE + pair % NUM_CHOSEN).to(tl.int64)
            column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            mask = is_pair[:, None] & (column < NUM_ROWS)[None, :]
            tl.store(out + to[:, None] * NUM_ROWS + column[None, :], (sums * share[:, None]).to(kind), mask=mask)
        else:
            gate, up = tl.split(tl.reshape(sums.to(kind).to(tl.float32), [PAIRS, ROWS // 2, 2]))
            column = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            at_out = out + place.to(tl.int64)[:, None] * (NUM_ROWS // 2) + column[None, :]
            mask = is_pair[:, None] & (column < NUM_ROWS // 2)[None, :]
            tl.store(at_out, gate_and_up(gate, up, KIND, ALPHA, LIMIT, kind), mask=mask)


@frozen(eq=False)
class Pairs:
    """Pairs of token and expert: number ``t * num_chosen + c`` is token t and the c-th of its experts.

    Attributes:
        ids: (T, num_chosen) int32, the experts.
        weights: (T, num_chosen) float32.
        order: (T * num_chosen,) int32, the pairs sorted by expert; None for one token, whose order does not matter.
        begins: (num_experts + 1,) int32, where the pairs of each expert begin in ``order``.
    """

    ids: Tensor
    weights: Tensor
    order: Tensor | None
    begins: Tensor | None

    @property
    def num_chosen(self) -> int:
        """Experts of a token."""
        return self.ids.shape[1]


def multiply(
    x: Tensor,
    part: Projection,
    pairs: Pairs,
    num_experts: int,
    activation: Activation | Clamped | None,
    out: Tensor,
    *,
    alternates: bool = False,
) -> None:
    """Multiply each token with the weights of its experts.

    Args:
        x: (T, width) with ``activation``; otherwise (pairs, width), the sorted pairs.
        part: (num_experts * num_rows, width).
        activation: of the rows of gate and up; None multiplies with the weights of the pairs instead.
        out: filled; with ``activation`` (pairs, num_rows / 2), the sorted pairs, otherwise (T, at least num_chosen,
            num_rows), the pairs by number.
        alternates: gate and up are neighbouring rows.
    """
    codes, scales, zeros, group, form = _stored(part, x)
    num_rows, width = len(codes) // num_experts, x.shape[1]
    clamped = activation if isinstance(activation, Clamped) else None
    kinds: dict[str, Any] = {
        "FORM": form,
        "HAS_ZEROS": zeros is not x,
        "HAS_BIAS": part.bias is not None,
        "KIND": activation if clamped is None else "clamped",
        "ALPHA": 0.0 if clamped is None else clamped.alpha,
        "LIMIT": 0.0 if clamped is None else clamped.limit,
        "ALTERNATES": alternates,
    }
    weights = codes, scales, zeros, x if part.bias is None else part.bias, pairs.ids
    in_words = form in ("int4", "mxfp4")
    is_single = pairs.order is None
    num_pairs = pairs.ids.numel()
    states = _split(x, pairs, num_experts) if form == "mxfp4" else None
    is_exact = in_words and x.dtype == torch.float32  # for which 16 bits are not enough
    if states is None and is_single and not is_exact and (group & group - 1 == 0 or group == width):
        is_grouped = group < width or in_words
        group = group if is_grouped else _divisor(width, 128)
        rows, columns, warps = _SINGLE[form]
        groups = max(1, min(columns // group, triton.next_power_of_2(width // group)))
        multiply_single[(triton.cdiv(num_rows, rows), pairs.num_chosen)](
            x, *weights, pairs.weights, out, width, num_rows, group, groups, rows, IS_GROUPED=is_grouped, **kinds,
            num_warps=warps, **OVERLAPPING,
        )  # fmt: skip
        return
    tiles = _tiles(form, num_pairs // num_experts, x.dtype) if states is None else _SPLIT
    block = tiles.block if in_words else _divisor(group, tiles.block)
    splits = 1 if is_single else max(1, num_pairs // num_experts // tiles.pairs)
    sorted_pairs = (pairs.ids, pairs.ids) if pairs.order is None else (pairs.order, pairs.begins)
    _multiply[(triton.cdiv(num_rows, tiles.rows), pairs.num_chosen if is_single else num_experts, splits)](
        *((x, x) if states is None else (states.codes, states.scales)), *weights, *sorted_pairs, pairs.weights, out,
        width, num_rows, group, pairs.num_chosen, out.shape[1], tiles.pairs, tiles.rows, block, **kinds,
        IS_SINGLE=is_single, IN_WORDS=in_words, IS_SPLIT=states is not None, STAGES=tiles.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiles.warps, num_stages=tiles.stages,
        **OVERLAPPING,
    )  # fmt: skip


def _split(x: Tensor, pairs: Pairs, num_experts: int) -> SplitStates | None:
    """Split the states if experts of MXFP4 have few pairs each; None if they are multiplied as they are."""
    is_few = pairs.order is not None and pairs.ids.numel() <= _MAX_SPLIT * num_experts
    if is_few and x.shape[1] % 64 == 0 and has_tensor_cores_of_8_bits(x):
        return split_states(x, 32, in_words=True)
    return None


_SINGLE = {"plain": (4, 2048, 4), "fp8": (8, 512, 2), "int4": (16, 2048, 4), "mxfp4": (16, 1024, 4)}
"""For one token, by form: rows, columns at once, warps. Measured on an H200."""


def _stored(part: Projection, none: Tensor) -> tuple[Tensor, Tensor, Tensor, int, str]:
    """Codes, factors and zeros (``none`` for those that do not exist), columns with one factor, and the form."""
    if isinstance(part, Linear):
        return part.weight, none, none, part.weight.shape[1], "plain"
    codes = part.codes.view(torch.uint8) if part.form == "fp8" else part.codes
    return codes, part.scales, none if part.zeros is None else part.zeros, part.width // part.scales.shape[1], part.form


def _divisor(size: int, largest: int) -> int:
    """Largest power of two up to ``largest`` that divides ``size``."""
    return min(largest, size & -size)


@frozen
class _Tiles:
    """Sizes of a product: pairs at once, rows, columns per turn; warps and stages of the pipeline."""

    pairs: int
    rows: int
    block: int
    warps: int
    stages: int


def _tiles(form: str, pairs_per_expert: int, dtype: torch.dtype) -> _Tiles:
    """Measured on an H200. Few pairs: as small as tensor cores allow, with many bytes of weights on their way."""
    if dtype == torch.float32:
        return _Tiles(16, 32, 128 if form in ("int4", "mxfp4") else 64, 4, 2)
    if pairs_per_expert <= 16:
        return _Tiles(16, 64, 128, 2, 3) if form == "mxfp4" else _Tiles(16, 64, 128, 4, 3)
    if pairs_per_expert <= 64:
        return _Tiles(64, 128, 64 if form == "plain" else 128, 4, 4 if form == "plain" else 3)
    return _Tiles(128, 128, 64 if form == "plain" else 128, 8, 2 if form == "mxfp4" else 3)


_MAX_SPLIT = 4
"""Most pairs of an expert, in the mean, for which states are split."""

_SPLIT = _Tiles(8, 64, 128, 4, 4)
"""Measured on an H200."""
