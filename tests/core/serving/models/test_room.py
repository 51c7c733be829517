"""The policy of the memory budget, and the whole manager under any order of requests, ends and orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from attrs import define, evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from enginehouse.contract.errors import (
    InsufficientMemory,
    ModelConflict,
    ModelLoadError,
    ModelNotFound,
    ModelNotReady,
    ModelTooLarge,
    ModelUnloaded,
    ServerStopping,
)
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.serving.changing import ModelChanger, load_model, unload_model
from enginehouse.serving.leases import Lease
from enginehouse.serving.memory import choose_evictions
from enginehouse.settings.config import Settings
from enginehouse.settings.limits import MemoryBudget, format_bytes, read_bytes
from enginehouse_testkit.waiting import until

from .tiny import TinyBackend, change, open_tiny, registry_of, settings_of, tiny

_T = TypeVar("_T")


@define(eq=False, kw_only=True)
class _Resident:
    name: str = "t"
    is_pinned: bool = False
    is_busy: bool = False
    last_used: float = 0.0

    async def evict(self, drain_s: float) -> bool:
        raise AssertionError("the policy only chooses")


_residents = st.dictionaries(
    st.builds(_Resident, is_pinned=st.booleans(), is_busy=st.booleans(), last_used=st.integers(0, 5)),
    st.integers(0, 10),
    max_size=7,
)


@given(needed=st.integers(1, 30), residents=_residents)
@settings(max_examples=300, deadline=None)
def test_candidates_for_eviction_suffice_are_all_needed_and_never_pinned(
    needed: int, residents: dict[_Resident, int]
) -> None:
    evictions = choose_evictions(needed, residents)
    movable = {resident: size for resident, size in residents.items() if not resident.is_pinned}

    if evictions is None:
        assert sum(movable.values()) < needed
        return
    freed = sum(residents[resident] for resident in evictions)
    assert set(evictions) <= movable.keys()
    assert freed >= needed
    assert all(freed - residents[resident] < needed for resident in evictions)
    if sum(size for resident, size in movable.items() if not resident.is_busy) >= needed:
        assert not any(resident.is_busy for resident in evictions)


def test_of_two_that_would_do_the_one_leaves_that_was_used_earlier() -> None:
    old, new, busy = _Resident(last_used=1), _Resident(last_used=2), _Resident(last_used=0, is_busy=True)

    assert choose_evictions(3, {new: 4, busy: 9, old: 4}) == [old]
    assert choose_evictions(5, {new: 4, busy: 9, old: 4}) == [old, new]
    assert choose_evictions(4, {new: 9, old: 1}) == [new]
    assert choose_evictions(11, {new: 4, busy: 9, old: 4}) == [old, busy]
    assert choose_evictions(18, {new: 4, busy: 9, old: 4}) is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("1.5 KiB", 1536),
        ("8GiB", 8 * 1024**3),
        ("500MB", 500_000_000),
        ("2 TB", 2 * 10**12),
    ],
)
def test_amounts_of_memory_are_numbers_or_texts_with_a_unit(text: Any, num_bytes: int) -> None:
    assert read_bytes(text) == num_bytes
    assert MemoryBudget.read(text) == MemoryBudget({"cpu": num_bytes})


@pytest.mark.parametrize("text", ["8G", "-5", "", "five", "5 5", 0, -1, True, 1.5, None, [], "1e3"])
def test_other_amounts_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_bytes(text)


def test_amounts_are_shown_with_a_fitting_unit() -> None:
    shown = [format_bytes(size) for size in (0, 1023, 1024, 1536 * 1024, 8 * 1024**3, 5000 * 1024**4)]

    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "8.0 GiB", "5000.0 TiB"]


async def test_models_that_wait_for_the_room_of_one_that_is_closed_get_it() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"a": tiny(2, gate="slow"), "b": tiny(2)}, budget=3), backend) as manager:
        asked = [asyncio.create_task(manager.lease(name)) for name in ("a", "b")]
        await until(lambda: manager.find("a").is_leaving)
        threading.Timer(0.1, backend.gates["slow"].set).start()
        await asyncio.gather(manager.find("a").close(), manager.find("a").unload(10.0))
        lease = await asked[1]

        assert lease.model.name == "b"
        with pytest.raises(ServerStopping):
            await asked[0]


# -- the manager under any order of things -----------------------------------------------------------

_BUDGET = 6
_SIZES = {"one": 1, "two": 2, "three": 3, "four": 4, "pinned": 2, "serving": 3}
_FINE = (InsufficientMemory, ModelTooLarge, ModelUnloaded, ModelNotFound, ModelNotReady, ModelLoadError)
_names = st.sampled_from(list(_SIZES))


class Manager(RuleBasedStateMachine):
    """Requests come, hold models and end, in any order, while an operator loads, unloads and changes settings."""

    asked: Bundle[asyncio.Task[Lease[LoadedModel]]] = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.backend = TinyBackend()
        self.tasks: list[asyncio.Task[Any]] = []
        self.orders: list[asyncio.Task[Any]] = []
        self.was_forced = False

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        async def limited() -> _T:
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(limited())

    @initialize()
    def start(self) -> None:
        self.models = {name: tiny(size) for name, size in _SIZES.items()}
        self.models["pinned"] = tiny(2, pin=True)
        self.models["serving"] = tiny(3, draining="serve")

        async def open_manager() -> ModelManager:
            manager = ModelManager(self.settings(), registry_of(self.backend))
            self.orders.append(asyncio.create_task(manager.start()))  # what follows does not wait for it
            return manager

        self.manager = self.run(open_manager())
        self.changer = ModelChanger(self.manager)

    def settings(self) -> Settings:
        return settings_of(self.models, _BUDGET, drain_s=0.02)

    @rule(target=asked, name=_names)
    def ask(self, name: str) -> asyncio.Task[Lease[LoadedModel]]:
        task = self.loop.create_task(self.manager.lease(name))
        self.tasks.append(task)
        self.run(asyncio.sleep(0))
        return task

    @rule(task=consumes(asked))
    def finish(self, task: asyncio.Task[Lease[LoadedModel]]) -> None:
        """A request ends, or its client leaves while it waits."""
        if task.done() and task.exception() is None:
            task.result().release()
        else:
            task.cancel()
            self.run(_ended(task))

    @rule(name=_names)
    def load(self, name: str) -> None:
        self.orders.append(self.loop.create_task(load_model(self.manager, name)))

    @rule(name=_names, drain=st.booleans(), force=st.booleans())
    def unload(self, name: str, drain: bool, force: bool) -> None:
        self.was_forced = self.was_forced or (force and name == "pinned")
        self.orders.append(self.loop.create_task(unload_model(self.manager, name, drain=drain, force=force)))

    @rule(
        name=st.sampled_from(["one", "three"]),
        size=st.sampled_from([1, 2, 4]),
        ttl=st.sampled_from([None, 0.005]),
        load=st.sampled_from(["lazy", "eager"]),
        fails=st.sampled_from(["", "", "damaged"]),
    )
    def configure(self, name: str, size: int, **fields: Any) -> None:
        self.models[name] = tiny(size, **fields)
        self.run(change(self.changer, self.settings()))

    @rule(name=st.sampled_from(["one", "three"]), pin=st.booleans())
    def take_out(self, name: str, pin: bool) -> None:
        """Perhaps to come back, and perhaps while it was about to be pinned."""
        if name in self.models:
            self.models[name] = evolve(self.models[name], pin=pin, ttl=None)
            self.run(change(self.changer, self.settings()))
            del self.models[name]
            self.run(change(self.changer, self.settings()))

    @rule(seconds=st.sampled_from([0.001, 0.005, 0.02]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @invariant()
    def never_more_is_open_than_the_budget_allows(self) -> None:
        assert self.backend.most_bytes <= _BUDGET

    @invariant()
    def a_pinned_model_stays_until_it_is_forced_out(self) -> None:
        if self.backend.num_opened.get("pinned") and not self.was_forced:
            assert self.backend.num_opened["pinned"] == 1
            assert self.manager.find("pinned").state in ("loading", "ready")  # it is open before that is known

    def teardown(self) -> None:
        """Every request has got its model or a clear error, and then nothing is left."""
        if not hasattr(self, "manager"):
            self.loop.close()
            return

        async def end() -> None:
            waiting = set(self.tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.cancelled():
                        continue
                    if task.exception() is None:
                        task.result().release()
                    else:
                        assert isinstance(task.exception(), _FINE), task.exception()
            for outcome in await asyncio.gather(*self.orders, return_exceptions=True):
                assert not isinstance(outcome, BaseException) or isinstance(outcome, (*_FINE, ModelConflict)), outcome
            await until(self.is_at_rest)
            await self.manager.close()

        self.run(end())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        assert self.backend.open_bytes == 0
        assert self.manager.room.held_bytes("cpu") == 0

    def is_at_rest(self) -> bool:
        """Nobody waits, what is not served holds no memory, and models have their settings, unless these load none."""
        served = self.manager.models
        return (
            not any(status.num_running + status.num_waiting for status in self.manager.statuses())
            and set(self.manager.room.holders) <= set(served.values())
            and list(served) == list(self.models)
            and all(
                model.settings.options["size"] == self.models[name].options["size"]
                or self.models[name].options.get("fails")
                for name, model in served.items()
            )
        )


async def _ended(task: asyncio.Task[Any]) -> None:
    """The task has ended; a lease that it got at the last moment is given back by the manager itself."""
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and task.exception() is None:
        task.result().release()


TestManager = Manager.TestCase
TestManager.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
