"""Who may hold memory: models take room before they load, and idle ones make way for others.

The budget is never exceeded: room is taken before a model loads and given back when its worker is gone. Knows no
backends, requests or names of settings; what it needs of a model is :class:`Tenant`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from enginehouse.contract.errors import InsufficientMemory, ModelTooLarge
from enginehouse.serving.memory import Footprint
from enginehouse.settings.memory_budget import MemoryBudget, format_bytes

__all__ = ["Room", "Tenant", "choose_leavers"]


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
