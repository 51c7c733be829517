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
from enginehouse.contract.errors import EnginehouseError, InsufficientMemory, ModelTooLarge
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.serving.opening import ModelPlan
from enginehouse.settings.config import structure_options
from enginehouse.settings.limits import MAIN_MEMORY, MemoryBudget, format_bytes

_log = logging.getLogger(__name__)

ESTIMATE_TIMEOUT_S = 60.0
_SHARE = 0.9  # of the machine's memory; the rest is for the server itself and the system
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNIFIED = ("gpu", "mps", "metal")  # devices of Apple machines, whose memory is the main memory


@frozen
class Footprint:
    """Memory that a model holds: number of bytes, and device."""

    num_bytes: int
    device: str = MAIN_MEMORY


def footprint_of(plan: ModelPlan) -> Footprint:
    """Estimate the memory of a model, its drafters, its adapters and the rows that it keeps.

    Failing the estimates of backends, the size of its files is taken.
    """
    device = MAIN_MEMORY
    if plan.placement is not None:
        return Footprint(0, device)  # its workers use the memory of other machines
    try:
        device = _device_of(plan)
        models = [(plan.source, plan.backend, plan.options)]
        models += [drafter.second for drafter in plan.drafters if drafter.second is not None]
        num_bytes = sum(_estimate(*model) for model in models)
        num_bytes += sum(_file_bytes(Path(one.path)) for one in plan.adapters if one.digest)
        return Footprint(num_bytes + plan.pooling.cache_bytes * (device == MAIN_MEMORY), device)
    except EnginehouseError as error:  # the guard has logged a failure; opening the model will say what else is wrong
        _log.debug("no estimate of the memory of %s: %s", plan.name, error)
        return Footprint(_file_bytes(plan.source.path), device)


async def footprint_in_thread(plan: ModelPlan) -> Footprint:
    """Run :func:`footprint_of` in its own thread, so that a hanging backend cannot keep the server from exiting."""
    try:
        async with asyncio.timeout(ESTIMATE_TIMEOUT_S):
            return await run_in_daemon_thread(f"footprint of {plan.name}", lambda: footprint_of(plan))
    except TimeoutError:
        text = "the backend %s could not estimate the memory of %s within %g s; the size of its files is taken"
        _log.warning(text, plan.backend.name, plan.name, ESTIMATE_TIMEOUT_S)
        return await run_in_daemon_thread(
            f"size of {plan.name}", lambda: Footprint(_file_bytes(plan.source.path), _device_of(plan))
        )


def default_budget() -> MemoryBudget:
    """Return the default budget: this machine's memory less a reserve. GPUs, of unknown size, are not limited."""
    sizes = [size for size in (_physical_bytes(), *map(_read_limit, _CGROUP_LIMITS)) if size]
    return MemoryBudget({MAIN_MEMORY: int(min(sizes) * _SHARE)} if sizes else {})


def _estimate(source: ModelSource, backend: Backend, options: dict[str, Any]) -> int:
    """Return the bytes that a backend needs for one model: of main memory, if it divides them by devices."""
    estimate = backend.estimate(source, structure_options(backend.options, options, "options"))
    if estimate.by_device:
        parts = ", ".join(f"{device} {format_bytes(num_bytes)}" for device, num_bytes in estimate.by_device.items())
        _log.info("%s needs about: %s", source.text, parts)
    return estimate.by_device.get("CPU", estimate.total_bytes)


def _device_of(plan: ModelPlan) -> str:
    """Return the device that the settings name, else the first device of the backend on this machine."""
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
    """Return the memory limit of the container; None if there is none."""
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


class Resident(Protocol):
    """A resident model: a model that may hold memory."""

    name: str

    @property
    def is_pinned(self) -> bool:
        """True if it must not be evicted."""
        ...

    @property
    def is_busy(self) -> bool:
        """True if requests use it, or it is being loaded for them."""
        ...

    @property
    def last_used(self) -> float:
        """Time of its last use, by any clock."""
        ...

    async def evict(self, drain_s: float) -> bool:
        """Free its memory once its requests have finished; False if they did not within ``drain_s``."""
        ...


def choose_evictions(needed: int, residents: Mapping[Resident, int]) -> Sequence[Resident] | None:
    """Return the models to evict to free ``needed`` bytes; None if evicting all candidates would not suffice.

    Idle models are evicted before busy ones, and among these the least recently used first; no model is evicted whose
    memory is not needed.

    Args:
        residents: all models that hold memory, with their bytes.
    """
    movable = [resident for resident in residents if not resident.is_pinned]
    chosen: list[Resident] = []
    freed = 0
    for resident in sorted(movable, key=lambda resident: (resident.is_busy, resident.last_used)):
        if freed >= needed:
            break
        chosen.append(resident)
        freed += residents[resident]
    if freed < needed:
        return None
    for resident in reversed(chosen):
        if freed - residents[resident] >= needed:
            chosen.remove(resident)
            freed -= residents[resident]
    return chosen


class Reservations:
    """Memory budget of this machine, and the reservations of models. Used on one event loop.

    Args:
        budget: available bytes by device.
        drain_s: seconds that a busy model gets to finish before its eviction is abandoned.
    """

    def __init__(self, budget: MemoryBudget, drain_s: float) -> None:
        self.budget = budget
        self.drain_s = drain_s
        self._held: dict[Resident, Footprint] = {}
        # One eviction at a time, in order of arrival, so that no model takes the memory that was freed for another.
        self._turn = asyncio.Lock()

    def held_bytes(self, device: str) -> int:
        """Return the bytes that all models hold on a device."""
        return sum(self._on(device).values())

    @property
    def holders(self) -> Collection[Resident]:
        """The models that hold memory."""
        return self._held.keys()

    def devices(self) -> Collection[str]:
        """Return the devices that have a limit or a resident model."""
        return sorted({*self.budget.by_device, *(footprint.device for footprint in self._held.values())})

    def footprint(self, resident: Resident) -> Footprint | None:
        """Return the memory that a model holds; None if it holds none."""
        return self._held.get(resident)

    def claim(self, resident: Resident, footprint: Footprint) -> bool:
        """Reserve memory if it is free, without evicting; returns False if it is not free.

        Raises:
            ModelTooLarge: evicting all candidates would not free enough.
        """
        if resident in self._held:
            return True
        limit = self.budget.by_device.get(footprint.device)
        if limit is not None:
            self.check(resident.name, footprint)
            if footprint.num_bytes + sum(self._on(footprint.device).values()) > limit:
                return False
        self._held[resident] = footprint
        return True

    def check(self, name: str, footprint: Footprint, param: str | None = None) -> None:
        """Check that a model could get its memory, possibly after evictions.

        Raises:
            ModelTooLarge: evicting all candidates would not free enough; ``param`` is its field.
        """
        limit = self.budget.by_device.get(footprint.device)
        if limit is None:
            return
        pinned = sum(size for other, size in self._on(footprint.device).items() if other.is_pinned)
        if footprint.num_bytes + pinned > limit:
            raise ModelTooLarge(self._refusal(name, footprint, limit), param)

    async def take(self, resident: Resident, footprint: Footprint) -> None:
        """Reserve memory; evict other models if necessary.

        Raises:
            ModelTooLarge: evicting all candidates would not free enough.
            InsufficientMemory: a model to be evicted stayed busy for too long.
        """
        if resident in self._held:
            return
        async with self._turn:
            while not self.claim(resident, footprint):
                limit = self.budget.by_device[footprint.device]
                others = self._on(footprint.device)
                evictions = choose_evictions(footprint.num_bytes + sum(others.values()) - limit, others)
                assert evictions, "claim() would have refused"
                if not await evictions[0].evict(self.drain_s):
                    busy = f"; {evictions[0].name!r} was busy for {self.drain_s:g} s"
                    raise InsufficientMemory(self._refusal(resident.name, footprint, limit) + busy)

    def free(self, resident: Resident) -> None:
        """Release the reservation; no effect if there is none."""
        self._held.pop(resident, None)

    def _on(self, device: str) -> dict[Resident, int]:
        return {
            resident: footprint.num_bytes for resident, footprint in self._held.items() if footprint.device == device
        }

    def _refusal(self, name: str, footprint: Footprint, limit: int) -> str:
        device = footprint.device
        held = _listed(self._on(device).items())
        return (
            f"The model {name!r} needs {format_bytes(footprint.num_bytes)} of memory ({device}); the budget "
            f"is {format_bytes(limit)} (limits.memory_budget), {f'of which {held}' if held else 'all of it free'}"
        )


def _listed(held: Iterable[tuple[Resident, int]]) -> str:
    parts = [
        f"{resident.name!r} holds {format_bytes(size)}{' (pinned)' if resident.is_pinned else ''}"
        for resident, size in held
    ]
    return ", ".join(parts)
