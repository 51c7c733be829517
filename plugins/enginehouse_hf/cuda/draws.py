"""Drawing tokens on the device: core's sampling specification in a few Triton kernels.

Tokens are ordered by logit descending, then id. Every truncation keeps a prefix of this order, so nothing is sorted: a
prefix is defined by its probability mass or its number of tokens, and its end is found by narrowing the range of
logits, in their order-preserving integer form, so that the search is exact. A search takes four kernels: two that sum
the tokens above several cuts and narrow the range to the interval between two cuts; one that collects the tokens in
it; one that ends the search among those few. Long rows are split into parts, which run in parallel, do not depend on
the batch and are summed in a fixed order, so a draw is the same in every batch.

Source: ``sampler`` is the specification. Core adds in float64, this in float32 with float64 at the end, so a draw
within about 1e-6 of a boundary may select the neighbouring token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from enginehouse_hf.cuda.search import collect, refine, survey
from enginehouse_hf.cuda.search_end import finish

__all__ = ["draw_rows", "draws_of_every_kind"]

_PART = 4096  # tokens of a row per program
_TILE = 1024  # tokens that it collects at once
_LIST_BLOCK = 2048
_WARPS = 4

_TOP_K, _TOP_P, _DRAW = 0, 1, 2
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def draw_rows(logits: Tensor, rules: NDArray[np.float64], last: Tensor) -> Tensor:
    """Draw one token from each of some rows.

    Args:
        logits: (num_rows_in_all, vocab_size), contiguous; -inf for tokens that are not allowed.
        rules: (7, num_rows): row of ``logits``, slot, temperature, top_k (0 off), top_p (1 off), min_p (0 off), and the
            random number in [0, 1).
        last: (num_slots,) int32; each token is written to the slot of its row.

    Returns:
        (num_rows,) int32 token ids; -1 where a row contains NaN or +inf, or only -inf.
    """
    width, is_weighted = logits.shape[1], rules[2] > 0.0
    kinds = [_TOP_K] if (is_weighted & (rules[3] > 0) & (rules[3] < width)).any() else []
    kinds += [_TOP_P] if (is_weighted & (rules[4] < 1.0)).any() else []
    on_device = torch.from_numpy(rules).pin_memory().to(logits.device, non_blocking=True)
    return _launch(logits, on_device, last, kinds, bool(is_weighted.any()))


def _launch(logits: Tensor, on_device: Tensor, last: Tensor, kinds: list[int], is_weighted: bool) -> Tensor:
    """Launch a draw with the truncations ``kinds``; if not ``is_weighted``, all rows are greedy."""
    num_rows, width = on_device.shape[1], logits.shape[1]
    device, stride, shift = logits.device, logits.stride(0), _SHIFTS[logits.dtype]
    block = min(_PART, triton.next_power_of_2(width))
    parts = triton.cdiv(width, block)
    grid, parts_wide = (num_rows, parts), triton.next_power_of_2(parts)
    records = torch.empty(num_rows, 48, dtype=torch.float64, device=device)
    sums = torch.empty(num_rows, parts, 8, dtype=torch.float32, device=device)
    # Rows of a multiple of 16 bytes: Triton would recompile a kernel for an argument with another alignment.
    arrivals = torch.zeros(7, -(-num_rows // 4) * 4, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
    survey[grid](
        logits, stride, on_device, num_rows, records, sums, arrivals, width, shift, block, parts_wide, num_warps=_WARPS
    )
    values, ids = logits, tokens  # buffers for collected tokens
    if is_weighted:
        values = torch.empty(num_rows, width, dtype=logits.dtype, device=device)
        ids = torch.empty(num_rows, width, dtype=torch.int32, device=device)
        counts = torch.empty(num_rows, parts, 8, dtype=torch.int32, device=device)
        offsets = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    for kind in (*kinds, _DRAW):
        if is_weighted:
            for turn in (0, 1):
                refine[grid](
                    logits, stride, on_device, num_rows, records, sums, counts, offsets, arrivals[1 + 2 * kind + turn],
                    width, kind, turn, shift, block, parts_wide, num_warps=_WARPS,
                )  # fmt: skip
            collect[grid](
                logits, stride, on_device, records, offsets, values, ids, width,
                kind, shift, block, min(_TILE, block), num_warps=_WARPS,
            )  # fmt: skip
        finish[(num_rows,)](
            on_device, num_rows, records, values, ids, tokens, last, width, kind, shift, min(_LIST_BLOCK, block),
            num_warps=8,
        )  # fmt: skip
    return tokens


def draws_of_every_kind(vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[Callable[[], Tensor]]:
    """Draws that together launch every kernel, from plain and from changed logits; for compilation."""
    rules = torch.tensor([[0.0], [0.0], [1.0], [2.0], [0.5], [0.0], [0.5]], dtype=torch.float64, device=device)
    last = torch.zeros(1, dtype=torch.int32, device=device)
    rows = [torch.zeros(1, vocab_size, dtype=kind, device=device) for kind in {dtype, torch.float32}]
    return [partial(_launch, logits, rules, last, [_TOP_K, _TOP_P], is_weighted=True) for logits in rows]
