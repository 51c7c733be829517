"""Products with weights of few bits, which are unpacked in registers: what is read from memory is the packed form.

One token: see ``single_words.py``. More, four bits: see ``four_bits.py``. FP8 with one factor per row is multiplied by
FP8: by states that are split, see ``split_states.py``, for many tokens by rounded ones, with one factor per token found
from its largest number. Other weights are unpacked in registers, as numbers of the model's type, for up to
:data:`MAX_UNPACKED` tokens; for more in memory, for cuBLAS. Integers of 8 bits: by split states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from enginehouse_hf.cuda.four_bits import project_four_bits
from enginehouse_hf.cuda.layers import gated
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.cuda.single_words import has_words, project_words
from enginehouse_hf.cuda.split_states import split_states, split_to_integers
from enginehouse_hf.cuda.structure import Activation
from enginehouse_hf.packed import Packed, has_tensor_cores_of_8_bits, rounds_states, unpacked

__all__ = ["MAX_FP8", "MAX_UNPACKED", "project_packed"]

MAX_FP8 = 256
"""Most tokens of the kernel that multiplies FP8 by FP8; more by cuBLAS."""

MAX_UNPACKED = 64
"""Most tokens for which FP8 is unpacked in registers where it cannot be multiplied by FP8."""

_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["num_tokens"])
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


@triton.jit(do_not_specialize=["num_tokens"])
def _project_split(
    x, x_scales, codes, scales, bias, out, num_tokens, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """8 bits by states that are split, see ``split_states.py``: the weights are the left operand, as they are."""
    IS_FP8: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    NUM_BLOCKS: tl.constexpr = WIDTH // BLOCK
    OWN: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    split = tl.program_id(1)
    column = tl.program_id(2) * TOKENS * 2 + tl.arange(0, TOKENS * 2)  # both parts of each token in turn
    row = tl.where(is_row, rows, 0).to(tl.int64)
    known = tl.where(column < num_tokens * 2, column, 0).to(tl.int64)
    await_previous()
    at_codes = codes + row[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    at_x = x + known[None, :] * WIDTH + tl.arange(0, BLOCK)[:, None]
    kind: tl.constexpr = tl.float32 if IS_FP8 else tl.int32
    sums = tl.zeros([ROWS, TOKENS * 2], kind)
    for block in tl.range(split * OWN, min(split * OWN + OWN, NUM_BLOCKS), num_stages=STAGES):
        sums = tl.dot(tl.load(at_codes + block * BLOCK), tl.load(at_x + block * BLOCK), sums, out_dtype=kind)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    high, low = tl.split(tl.reshape(sums.to(tl.float32), [ROWS, TOKENS, 2]))
    result = (high + low * (0.0625 if IS_FP8 else 0.00390625)) * tl.load(scales + row).to(tl.float32)[:, None]
    result *= tl.load(x_scales + token, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        result += tl.where(split == 0, added, 0.0)[:, None]
    at_out = out + (token.to(tl.int64)[None, :] * SPLITS + split) * num_rows + rows[:, None]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=is_token[None, :] & is_row[:, None])


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


def project_packed(x: Tensor, part: Packed, activation: Activation | None = None, *, may_split: bool = False) -> Tensor:
    """Compute ``linear(x, weights, bias)`` of packed weights.

    Args:
        x: (T, width).
        part: (num_rows, width); with ``activation`` the rows of the gate, then as many of the other factor: the result
            is ``activation(gate) * up``, half as many rows.
        may_split: the columns may be split among programs, which leaves the sum to the caller; not of what is
            activated.

    Returns:
        (T, num_rows), or with ``may_split`` (T, n, num_rows) float32, whose n rows add up to the result.
    """
    if len(x) == 1 and has_words(part):
        return project_words(x, part, activation, may_split)
    if activation is not None:
        return gated(project_packed(x, part, may_split=True), activation, x.dtype)
    return (project_four_bits if part.form == "tiles" else _project_eight_bits)(x, part, may_split)


def _project_eight_bits(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    num_tokens = len(x)
    may_multiply_8_bits = num_tokens <= MAX_FP8 and part.width % _LEAST_COLUMNS == 0 and has_tensor_cores_of_8_bits(x)
    if rounds_states(x, part):
        return _round_and_multiply(x, part, may_split)
    if may_multiply_8_bits and part.scales.shape[1] == 1:
        return _split(x, part, may_split)
    if num_tokens <= MAX_UNPACKED and part.form == "fp8" and x.dtype != torch.float32:
        return _few(x, None, part, x.dtype, may_split)
    return linear(x, unpacked(part, x.dtype), part.bias)


def _round_and_multiply(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    codes, scales = _rounded(x)
    if len(x) <= MAX_FP8 or part.num_rows % 16 or part.width % 16:  # which cuBLAS refuses
        return _few(codes, scales, part, x.dtype, may_split)
    result = torch._scaled_mm(codes, part.codes.T, scales, part.scales.T, out_dtype=x.dtype, use_fast_accum=True)
    return result if part.bias is None else result.add_(part.bias)


def _group(part: Packed) -> int:
    """Columns that are taken together: those with one factor; of rows with one factor as many as suit."""
    return part.group if part.group < part.width else min(128, part.width & -part.width)


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


def _split(x: Tensor, part: Packed, may_split: bool) -> Tensor:
    num_tokens, num_rows, block = len(x), part.num_rows, _group(part)
    if part.form == "int8":
        codes, scales = split_to_integers(x)
    else:
        states = split_states(x, block)
        codes, scales = states.codes, states.scales
    assert scales is not None
    tokens = max(8, min(64, triton.next_power_of_2(num_tokens)))
    rows, warps, stages = 64, 4, 4
    wanted = min(_PROGRAMS * rows // num_rows, part.width // block // 4) if may_split else 1
    splits = 1 << (max(1, wanted).bit_length() - 1)
    shape = (num_tokens, num_rows) if splits == 1 else (num_tokens, splits, num_rows)
    out = torch.empty(shape, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    _project_split[(triton.cdiv(num_rows, rows), splits, triton.cdiv(num_tokens, tokens))](
        codes, scales, part.codes, part.scales, x if part.bias is None else part.bias, out, num_tokens, num_rows,
        part.width, block, tokens, rows, splits, part.bias is not None, stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


_PROGRAMS = 264
"""Programs that the columns are split for: two for each of an H200's 132 multiprocessors."""

_LEAST_COLUMNS = 32
"""Depth of a tile of the tensor cores that multiply FP8."""


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes of (T, width), and (T, 1) factors."""
    num_tokens, width = x.shape
    codes = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    _round_tokens[(num_tokens,)](x, codes, scales, width, triton.next_power_of_2(width), num_warps=8, **OVERLAPPING)
    return codes, scales
