"""How much memory a model will need and where, and how much this machine has.

Asks backends for estimates and the operating system for sizes; decides nothing (see ``room``). All of it blocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.serving.background import apart
from enginehouse.serving.opening import ModelPlan
from enginehouse.settings.config import structure_options
from enginehouse.settings.memory_budget import MAIN_MEMORY, MemoryBudget

__all__ = ["ESTIMATE_TIMEOUT_S", "Footprint", "default_budget", "footprint_apart", "footprint_of"]

_log = logging.getLogger(__name__)

ESTIMATE_TIMEOUT_S = 60.0
_SHARE = 0.9  # of the machine's memory; the rest is for the server itself and the system
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNIFIED = ("gpu", "mps", "metal")  # devices of Apple's machines, whose memory is the main memory


@frozen
class Footprint:
    """Memory that a model holds: how many bytes, and on which device."""

    num_bytes: int
    device: str = MAIN_MEMORY


def footprint_of(plan: ModelPlan) -> Footprint:
    """What a model and those that draft for it will hold, by their backends' estimates, or by the size of its files."""
    device = MAIN_MEMORY
    try:
        device = _device_of(plan)
        models = [(plan.source, plan.backend, plan.options)]
        models += [drafter.second for drafter in plan.drafters if drafter.second is not None]
        return Footprint(sum(_estimate(*model) for model in models), device)
    except Exception as error:  # noqa: BLE001 - border to the backend: opening the model will say what is wrong
        _log.debug("no estimate of the memory of %s: %s", plan.name, error)
        return Footprint(_file_bytes(plan.source.path), device)


async def footprint_apart(plan: ModelPlan) -> Footprint:
    """See :func:`footprint_of`: beside the event loop, and where a backend that hangs keeps no server from ending."""
    try:
        async with asyncio.timeout(ESTIMATE_TIMEOUT_S):
            return await apart(f"footprint of {plan.name}", lambda: footprint_of(plan))
    except TimeoutError:
        text = "the backend %s could not estimate the memory of %s within %g s; the size of its files is taken"
        _log.warning(text, plan.backend.name, plan.name, ESTIMATE_TIMEOUT_S)
        return await apart(f"size of {plan.name}", lambda: Footprint(_file_bytes(plan.source.path), _device_of(plan)))


def default_budget() -> MemoryBudget:
    """What this machine has, less a little for everything else. GPUs are not bounded: nobody here knows their sizes."""
    sizes = [size for size in (_physical_bytes(), *map(_read_limit, _CGROUP_LIMITS)) if size]
    return MemoryBudget({MAIN_MEMORY: int(min(sizes) * _SHARE)} if sizes else {})


def _estimate(source: ModelSource, backend: Backend, options: dict[str, Any]) -> int:
    """Bytes that a backend will need for one model."""
    return backend.estimate(source, structure_options(backend.options, options, "options")).total_bytes


def _device_of(plan: ModelPlan) -> str:
    """The device that the settings name, else the first that the backend has here."""
    named = str(plan.options.get("device", "auto"))
    if named == "auto":
        named = next(iter(plan.backend.probe().devices), MAIN_MEMORY)
    if sys.platform == "darwin" and named.partition(":")[0] in _UNIFIED:
        return MAIN_MEMORY
    return f"{named}:0" if named == "cuda" else named


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _read_limit(path: Path) -> int | None:
    """The bound of a container; None where there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _file_bytes(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        files = [path] if path.is_file() else path.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        return 0
