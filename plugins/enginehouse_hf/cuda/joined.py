"""Low-rank updates within the kernel of a product for a few tokens: no launch more than without adapters.

The first programs of such a kernel multiply the inputs by the halves A and count themselves done; the others compute
the product, wait for this count, and add the results times the halves B, whose first columns they read before the
product. Programs start in the order of their numbers, so that those that are awaited run when another waits.

The kernel is in ``few.py``; ``vector.py`` has that for one token, ``lora.py`` updates of all other products.

Source: the counted wait is that of decoupled look-back (Merrill and Garland, 2016, "Single-pass Parallel Prefix Scan").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.lora import Stack
from enginehouse_hf.cuda.overlap import OVERLAPS

__all__ = ["MIN_ROWS", "Update", "add_columns", "arguments", "await_count", "publish", "shrink_rows"]

MIN_ROWS = 16
"""Rows of A that a program of :func:`shrink_rows` multiplies; a rank is a multiple of it."""


@frozen(eq=False)
class Update:
    """What the adapters of a step add to one product.

    Attributes:
        stack: of the projection; its numbers of adapters and of ranks are powers of two.
        scales: (num_adapters, T) float32, how much each token uses of each adapter; 0 is not at all.
        done: (1,) int32, zero: the count of programs.
    """

    stack: Stack
    scales: Tensor
    done: Tensor


def arguments(
    update: Update | None, x: Tensor, rows: int, splits: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...], int]:
    """Tensors and numbers of an update for a kernel, in the order of its parameters; without one they are not read.

    Args:
        x: inputs of the product.
        rows: rows of A of a program.
        splits: programs among which the columns of A are split.

    Returns:
        The tensors, the numbers, and how many programs multiply by A.
    """
    if update is None:
        return (x,) * 5, (0,) * 5, 0
    stack = update.stack
    num_low = len(stack.a)
    num_shrinks = num_low // rows * splits
    low = torch.empty(splits, len(x), num_low, dtype=torch.float32, device=x.device)
    numbers = *(*stack.rows, 0)[:2], num_shrinks, stack.num_adapters, num_low
    return (stack.a, stack.b, update.scales, low, update.done), numbers, num_shrinks


@triton.jit
def await_count(done, count):
    """Wait until ``count`` programs of this kernel have published their results."""
    if OVERLAPS:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [done], dtype=tl.int32, is_pure=False, pack=1
        )
        while seen < count:
            seen = tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [done], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()
    else:
        while tl.atomic_add(done, 0, sem="acquire") < count:
            pass


@triton.jit
def publish(done):
    """Count this program, after all that it has stored."""
    tl.debug_barrier()
    tl.atomic_add(done, 1, sem="release")


@triton.jit
def shrink_rows(
    x, a, scales, low, program, num_tokens, num_adapters, num_low,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store ``scale * (a @ x)`` of ROWS rows and a share of the columns in (SPLITS, T, num_low); zero if not used."""
    OWN: tl.constexpr = WIDTH // SPLITS
    num_tiles = num_low // ROWS
    first, split = program % num_tiles * ROWS, program // num_tiles
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    scale = tl.load(scales + first // RANK % num_adapters * num_tokens + token, mask=is_token, other=0.0)
    end = tl.where(tl.max((scale != 0.0).to(tl.int32), 0) > 0, OWN, 0)
    row, column = first + tl.arange(0, ROWS), split * OWN + tl.arange(0, BLOCK)
    at_a = a + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    at_x = x + tl.where(is_token, token, 0)[None, :] * WIDTH + column[:, None]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, end, BLOCK, num_stages=STAGES):
        sums = tl.dot(tl.load(at_a + start), tl.load(at_x + start), sums)
    at_low = low + (split * num_tokens + token)[None, :] * num_low + row[:, None]
    tl.store(at_low, sums * scale[None, :], mask=is_token[None, :])


@triton.jit
def add_columns(sums, half, low, part, first, num_tokens, num_columns, num_low,
                TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """``sums`` (ROWS, TOKENS) and ``half`` (ROWS, COLUMNS) of B from column ``first`` on, times the results for A."""
    token = tl.arange(0, TOKENS)
    row = tl.where(token < num_tokens, token, 0)
    at_low = low + row[None, :] * num_low + (part * num_columns + first + tl.arange(0, COLUMNS))[:, None]
    value = tl.load(at_low)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(at_low + split * num_tokens * num_low)
    return tl.dot(half, value.to(half.dtype), sums)
