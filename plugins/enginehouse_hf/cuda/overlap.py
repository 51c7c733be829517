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

__all__ = ["OVERLAPPING", "OVERLAPS", "await_previous", "await_results", "fetch", "start_next"]


def _is_supported() -> bool:
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    has_waits = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_waits and bool(capabilities) and min(capabilities) >= (9, 0)


OVERLAPS = tl.constexpr(_is_supported())

OVERLAPPING: dict[str, Any] = {"launch_pdl": True} if OVERLAPS.value else {}
"""Arguments of such a launch."""


@triton.jit
def fetch(at, NUM_BYTES: tl.constexpr):
    """Have ``NUM_BYTES`` from each address on brought to the second-level cache, if kernels overlap.

    Args:
        at: pointers, multiples of 16 bytes.
        NUM_BYTES: a multiple of 16.
    """
    if OVERLAPS:
        size = tl.full(at.shape, NUM_BYTES, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def start_next():
    """Let the next kernel start; for kernels that have something to do before :func:`await_previous`."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_results():
    """Wait for the results of all kernels launched before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_previous():
    """Wait for the results of all kernels launched before; let the next kernel start."""
    start_next()
    await_results()
