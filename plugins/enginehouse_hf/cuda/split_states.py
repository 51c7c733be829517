"""States of bfloat16 as sums of two numbers of 8 bits, which tensor cores multiply with weights of few bits directly.

FP8 (e4m3): a number of bfloat16 has eight significant bits, one of e4m3 four, so that two of them hold it: exactly, if
it is not below 2^-13 of the largest of its token, and otherwise up to 2^-21 of that. The weights then need hardly any
unpacking: those in FP8 none, and an integer of four bits, as the bits of an e4m3 number, is that integer times 2^-9.

Integers: a state is rounded to 16 bits, relative to the largest of its token.

Numbers of other types stay as they are.

Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores" (2022), for float32 and two numbers
of 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous
from enginehouse_hf.packed import has_tensor_cores_of_8_bits

__all__ = ["SplitStates", "split_states", "split_to_integers"]


@triton.jit
def _rounded(x):
    """The nearest e4m3 number to a float32 of at most 448, computed without a type of 8 bits.

    ptxas of CUDA 12.8 compiles a conversion to e4m3 and back wrongly.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # below 2^-6 they are 2^-9 apart


@triton.jit(do_not_specialize=["num_tokens"])
def _split(
    x, codes, sums, scales, num_tokens,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IS_FP8: tl.constexpr,
    IN_WORDS: tl.constexpr,
):  # fmt: skip
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    group = tl.arange(0, BLOCK // GROUP)
    is_group = group < WIDTH // GROUP
    value = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    at_sum = sums + (group * num_tokens + token) * PARTS
    if IS_FP8:
        largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / 448.0
        scale = ((largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scales + token, scale)
        whole = value * (1.0 / scale)
        value = _rounded(whole)
        place = columns
        if IN_WORDS:
            index = columns % (GROUP // 8) * 4 + columns % GROUP // (GROUP // 4)  # of the byte with the code in a group
            is_upper = columns % GROUP // (GROUP // 8) % 2
            place = columns // GROUP * GROUP + index // 16 * 32 + is_upper * 16 + index % 16
        at_code = codes + token * PARTS * WIDTH + place
        tl.store(at_code, value.to(tl.float8e4nv), mask=inside)
        if PARTS == 2:
            low = _rounded((whole - value) * 16.0)
            tl.store(at_code + WIDTH, low.to(tl.float8e4nv), mask=inside)
            tl.store(at_sum + 1, tl.sum(tl.reshape(low, [BLOCK // GROUP, GROUP]), 1), mask=is_group)
    tl.store(at_sum, tl.sum(tl.reshape(value, [BLOCK // GROUP, GROUP]), 1), mask=is_group)


@triton.jit
def _split_to_integers(x, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / 32512.0  # 127 * 256
    whole = (value / scale + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # the nearest integer
    high = (whole + 128) >> 8
    at_code = codes + token * 2 * WIDTH + columns
    tl.store(at_code, high.to(tl.int8), mask=inside)
    tl.store(at_code + WIDTH, (whole - (high << 8)).to(tl.int8), mask=inside)
    tl.store(scales + token, scale * 256.0)


@frozen(eq=False)
class SplitStates:
    """States (T, width): row t is ``scales[t]`` times the sum of some rows of codes, of which a second counts 1/16.

    Attributes:
        codes: (num_parts * T, width) float8_e4m3fn, the parts of each state in turn; of 16 bits without scales.
        sums: (groups, rows of codes) float32, the sum of each group of columns.
        scales: (T,) float32.
    """

    codes: Tensor
    sums: Tensor
    scales: Tensor | None
    num_parts: int


def split_states(x: Tensor, group: int, num_parts: int = 2, *, in_words: bool = False) -> SplitStates:
    """Split states (T, width), if tensor cores multiply them, and sum up each ``group`` of columns, a power of two.

    Args:
        num_parts: 1 rounds the states instead, by up to 1/16.
        in_words: the columns of a group are in the order of :class:`enginehouse_hf.packed.Packed` in words: of 16
            bytes first those in the lower halves, then those in the upper halves.
    """
    num_tokens, width = x.shape
    is_fp8 = has_tensor_cores_of_8_bits(x)
    num_parts = num_parts if is_fp8 else 1
    codes, scales = x, None
    if is_fp8:
        codes = torch.empty(num_parts * num_tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    sums = torch.empty(width // group, num_parts * num_tokens, dtype=torch.float32, device=x.device)
    _split[(num_tokens,)](
        x, codes, sums, sums if scales is None else scales, num_tokens, width, group, triton.next_power_of_2(width),
        num_parts, is_fp8, in_words, num_warps=8, **OVERLAPPING,
    )  # fmt: skip
    return SplitStates(codes, sums, scales, num_parts)


def split_to_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (2 * T, width) int8 of states (T, width), and scales (T,); a second code counts 1/256 of a first one."""
    num_tokens, width = x.shape
    codes = torch.empty(2 * num_tokens, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    _split_to_integers[(num_tokens,)](
        x, codes, scales, width, triton.next_power_of_2(width), num_warps=8, **OVERLAPPING
    )
    return codes, scales
