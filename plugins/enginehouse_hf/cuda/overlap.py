"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it uses its results.

On Hopper and later GPUs this hides most of the time between two kernels of a recorded step. Every kernel launched with
:data:`OVERLAPPING` calls :func:`await_previous` before it reads or writes anything that another kernel writes or reads;
weights may be read before.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; ``gdc_wait`` of Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["OVERLAPPING", "await_previous", "num_prefetched", "num_prefetchers", "prefetch"]


def _is_supported() -> bool:
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    has_waits = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_waits and bool(capabilities) and min(capabilities) >= (9, 0)


_OVERLAPS = tl.constexpr(_is_supported())

OVERLAPPING: dict[str, Any] = {"launch_pdl": True} if _OVERLAPS.value else {}
"""Arguments of such a launch."""


@triton.jit
def await_previous():
    """Wait for the results of all kernels launched before; let the next kernel start."""
    if _OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


MAX_PREFETCHED_BYTES = 24 << 20
"""Part of the second-level cache that is filled ahead."""

MAX_PREFETCHING_TOKENS = 32
"""Most tokens for which a step waits for memory only."""

_NUM_PREFETCHERS = 32
_LINE_BYTES = tl.constexpr(128)


def num_prefetched(weights: Tensor | None, num_tokens: int) -> int:
    """Number of cache lines of the weights of the next product to bring closer."""
    if weights is None or num_tokens > MAX_PREFETCHING_TOKENS or not OVERLAPPING:
        return 0
    return min(weights.nbytes, MAX_PREFETCHED_BYTES) // _LINE_BYTES.value


def num_prefetchers(num_lines: int, num_tokens: int) -> int:
    """Number of programs per token that bring ``num_lines`` closer."""
    return triton.cdiv(_NUM_PREFETCHERS, num_tokens) if num_lines else 0


@triton.jit
def prefetch(weights, num_lines, extra):
    """Start to bring one share of the first lines of some weights to the second-level cache. Waits for nothing.

    The programs that do so are the last along axis 1, with the numbers ``extra`` from 0 on, for each along axis 0.
    """
    if _OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.program_id(0) + extra * tl.num_programs(0)
    num_shares = tl.num_programs(0) * (tl.num_programs(1) - tl.program_id(1) + extra)
    for start in range(share * 256, num_lines, num_shares * 256):
        line = start + tl.arange(0, 256)
        address = weights.to(tl.int64) + tl.minimum(line, num_lines - 1) * _LINE_BYTES
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
        )
