"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it uses its results.

On Hopper and later GPUs this hides most of the time between two kernels of a recorded step. Every kernel launched with
:data:`OVERLAPPING` calls :func:`await_results`, or :func:`await_previous`, before it reads or writes anything that
another kernel of the step writes or reads. What the step is given may be read before: weights, and the numbers that
are uploaded for it, since its first kernel waits for all work before.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; ``gdc_wait`` of Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["OVERLAPPING", "OVERLAPS", "await_previous", "await_results", "start_next"]


def _is_supported() -> bool:
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    has_waits = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_waits and bool(capabilities) and min(capabilities) >= (9, 0)


OVERLAPS = tl.constexpr(_is_supported())
"""Kernels overlap: all GPUs are Hopper's kind or later."""

OVERLAPPING: dict[str, Any] = {"launch_pdl": True} if OVERLAPS.value else {}
"""Arguments of such a launch."""


@triton.jit
def start_next():
    """Let the next kernel start, once all programs of this one have called this or ended."""
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
