"""Memory budget: models reserve memory before they load; idle models are evicted to free it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import InsufficientMemory, ModelTooLarge
from enginehouse.serving.background import apart
from enginehouse.serving.opening import ModelPlan
from enginehouse.settings.config import structure_options
from enginehouse.settings.limits import MAIN_MEMORY, MemoryBudget, format_bytes

__all__ = [
    "ESTIMATE_TIMEOUT_S",
    "Footprint",
    "Room",
    "Tenant",
    "choose_leavers",
    "default_budget",
    "footprint_apart",
    "footprint_of",
]

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


class Tenant(Protocol):
    """A model that may hold memory."""

    name: str

    @property
    def is_pinned(self) -> bool:
        """Whether it may never be asked to make way."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether requests use it or it is still loading for them."""
        ...

    @property
    def last_used(self) -> float:
        """When it was used last; any clock."""
        ...

    async def make_way(self, drain_s: float) -> bool:
        """Give its room back once its requests have finished; False when they did not within ``drain_s``."""
        ...


def choose_leavers(needed: int, tenants: Mapping[Tenant, int]) -> Sequence[Tenant] | None:
    """Which tenants should go to free ``needed`` bytes; None when even all that may go would not suffice.

    Idle ones go before busy ones, and of each kind those first that were not used for the longest time; none goes
    whose room is not needed.

    Args:
        tenants: all who hold memory, with how much.
    """
    movable = [tenant for tenant in tenants if not tenant.is_pinned]
    chosen: list[Tenant] = []
    freed = 0
    for tenant in sorted(movable, key=lambda tenant: (tenant.is_busy, tenant.last_used)):
        if freed >= needed:
            break
        chosen.append(tenant)
        freed += tenants[tenant]
    if freed < needed:
        return None
    for tenant in reversed(chosen):
        if freed - tenants[tenant] >= needed:
            chosen.remove(tenant)
            freed -= tenants[tenant]
    return chosen


class Room:
    """The memory of this machine as far as models may have it. Used on one event loop.

    Args:
        budget: how much there is, by device.
        drain_s: seconds that a busy tenant gets to finish before the attempt is given up.
    """

    def __init__(self, budget: MemoryBudget, drain_s: float) -> None:
        self.budget = budget
        self.drain_s = drain_s
        self._held: dict[Tenant, Footprint] = {}
        # One at a time makes room, in order of arrival, so that two cannot take what was freed for the other.
        self._turn = asyncio.Lock()

    def held_bytes(self, device: str) -> int:
        """What all tenants hold on a device."""
        return sum(self._on(device).values())

    def devices(self) -> Collection[str]:
        """Devices that have a bound or a tenant."""
        return sorted({*self.budget.by_device, *(footprint.device for footprint in self._held.values())})

    def footprint(self, tenant: Tenant) -> Footprint | None:
        """What a tenant holds; None when it holds nothing."""
        return self._held.get(tenant)

    def claim(self, tenant: Tenant, footprint: Footprint) -> bool:
        """Take room if it is free, without asking anybody to go.

        Raises:
            ModelTooLarge: there would not be enough if everybody went who may.
        """
        if tenant in self._held:
            return True
        limit = self.budget.by_device.get(footprint.device)
        if limit is not None:
            others = self._on(footprint.device)
            pinned = sum(size for other, size in others.items() if other.is_pinned)
            if footprint.num_bytes + pinned > limit:
                raise ModelTooLarge(self._refusal(tenant, footprint, limit))
            if footprint.num_bytes + sum(others.values()) > limit:
                return False
        self._held[tenant] = footprint
        return True

    async def take(self, tenant: Tenant, footprint: Footprint) -> None:
        """Take room, for which others make way if necessary.

        Raises:
            ModelTooLarge: there would not be enough if everybody went who may.
            InsufficientMemory: one who should go stayed busy for too long.
        """
        if tenant in self._held:
            return
        async with self._turn:
            while not self.claim(tenant, footprint):
                limit = self.budget.by_device[footprint.device]
                others = self._on(footprint.device)
                leavers = choose_leavers(footprint.num_bytes + sum(others.values()) - limit, others)
                assert leavers, "claim() would have refused"
                if not await leavers[0].make_way(self.drain_s):
                    busy = f"; {leavers[0].name!r} was busy for {self.drain_s:g} s"
                    raise InsufficientMemory(self._refusal(tenant, footprint, limit) + busy)

    def free(self, tenant: Tenant) -> None:
        """Give room back; harmless when there is none."""
        self._held.pop(tenant, None)

    def _on(self, device: str) -> dict[Tenant, int]:
        return {tenant: footprint.num_bytes for tenant, footprint in self._held.items() if footprint.device == device}

    def _refusal(self, tenant: Tenant, footprint: Footprint, limit: int) -> str:
        device = footprint.device
        held = _listed(self._on(device).items())
        return (
            f"The model {tenant.name!r} needs {format_bytes(footprint.num_bytes)} of memory ({device}); the budget is "
            f"{format_bytes(limit)} (limits.memory_budget), {f'of which {held}' if held else 'all of it free'}"
        )


def _listed(held: Iterable[tuple[Tenant, int]]) -> str:
    parts = [
        f"{tenant.name!r} holds {format_bytes(size)}{' (pinned)' if tenant.is_pinned else ''}" for tenant, size in held
    ]
    return ", ".join(parts)
