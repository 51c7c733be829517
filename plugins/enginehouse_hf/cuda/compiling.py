"""Compiling the Triton kernels of some work before it runs, all at once.

Triton compiles a kernel when it is first launched, and each launch waits for its own. Here the work is recorded as CUDA
graphs that are thrown away: the device runs nothing, and a hook of Triton notes every kernel that is not compiled yet
instead of compiling it. These are then compiled in as many threads as there are processors: most of the compiler is
native code, which runs in parallel. Called by ``opening.py``; does not know which kernels there are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from attrs import frozen

__all__ = ["compile_together"]

_log = logging.getLogger(__name__)

_loading = threading.Lock()


@frozen
class _Kernel:
    """A kernel to compile: its function, and the arguments for which it is specialised, as Triton describes them."""

    function: Any
    arguments: str

    def compile(self) -> None:
        """Compile it, or read it from Triton's folder of compiled kernels.

        Its launcher is loaded at its first launch: launchers are extension modules of one name, and kernels got those
        of others when several threads loaded them.
        """
        self.function.preload(self.arguments)


def compile_together(works: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Compile the kernels that some work launches; return the number of those that were not compiled before.

    Best effort: work that cannot be recorded, and kernels that cannot be compiled, are left to their first launch,
    which tells the reason.

    Args:
        works: functions that launch kernels and read nothing on the host in between.
        device: where they launch them.
    """
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_cache_hook"):
        return 0  # a version of Triton without this hook
    with _noting(runtime) as kernels:
        for work in works:
            _record(work)
    if not kernels:
        return 0
    num_threads = min(len(kernels), _num_processors())
    with ThreadPoolExecutor(num_threads, "compile", partial(torch.cuda.set_device, device)) as threads:
        for kernel, error in zip(kernels.values(), threads.map(_error_of, kernels.values()), strict=True):
            if error is not None:
                _log.debug("hf: the kernel %s is left to its first launch: %r", kernel.function, error)
    return len(kernels)


@contextmanager
def _noting(runtime: Any) -> Iterator[dict[Any, _Kernel]]:
    """Note kernels instead of compiling and launching them."""
    kernels: dict[Any, _Kernel] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_others: Any) -> bool:
        kernels[fn.jit_function, compile["key"]] = _Kernel(fn.jit_function, compile["specialization_data"])
        return True  # neither compiled nor launched

    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        yield kernels
    finally:
        runtime.jit_cache_hook = before


def _record(work: Callable[[], object]) -> None:
    """Record work without running it."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            work()
    except Exception as error:  # noqa: BLE001 - it will be run again, where its errors are handled
        _log.debug("hf: work is not recorded for compilation: %r", error)


def _error_of(kernel: _Kernel) -> Exception | None:
    try:
        kernel.compile()
    except Exception as error:  # noqa: BLE001 - errors of the compiler have no common base
        return error
    return None


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
