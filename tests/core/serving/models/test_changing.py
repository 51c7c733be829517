"""A new configuration meets loaded models: what stays, what is swapped and when, what leaves."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import pytest
from attrs import evolve

from enginehouse.contract.backend import Probe
from enginehouse.contract.errors import (
    ConfigError,
    ModelConflict,
    ModelNotFound,
    ModelUnloaded,
    ServerStopping,
)
from enginehouse.serving import ModelManager
from enginehouse.serving.changing import ModelChanger, find_changes, load_model, unload_model
from enginehouse.serving.lifecycle import ModelEvent
from enginehouse.serving.sources import OnShare
from enginehouse.settings.config import ModelSettings, ServerSettings
from enginehouse_testkit.waiting import until

from .tiny import TinyBackend, all_events, change, endless, open_tiny, read, registry_of, settings_of, states, tiny


def all_of(manager: ModelManager, **wanted: str) -> bool:
    return states(manager) == wanted


def test_only_settings_of_the_worker_need_another_one() -> None:
    old = {"same": tiny(), "named": tiny(), "grown": tiny(), "gone": tiny()}
    new = {
        "same": tiny(),
        "named": tiny(aliases=("x",), defaults={"temperature": 0}, pin=True),
        "grown": tiny(2),
        "new": tiny(),
    }
    changes = find_changes(old, new)

    assert (changes.kept, changes.updated, changes.replaced) == (("same",), ("named",), ("grown",))
    assert (changes.added, changes.removed) == (("new",), ("gone",))


async def test_models_appear_and_leave_and_the_others_do_not_notice() -> None:
    backend = TinyBackend()
    before: Mapping[str, ModelSettings] = {"kept": tiny(load="eager"), "gone": tiny(load="eager", aliases=("g",))}
    async with open_tiny(settings_of(before), backend) as manager:
        kept, gone = await endless(manager, "kept"), await endless(manager, "gone")
        reading = asyncio.create_task(read(gone))
        loaded = manager.get("kept")
        changer = ModelChanger(manager)
        await change(changer, settings_of({"new": tiny(load="eager"), "kept": tiny(load="eager"), "lazy": tiny()}))
        await until(lambda: all_of(manager, new="ready", kept="ready", lazy="unloaded"))

        assert [status.name for status in manager.statuses()] == ["new", "kept", "lazy"]
        assert manager.get("kept") is loaded
        assert manager.get(None).name == "new"
        for name in ("gone", "g"):
            with pytest.raises(ModelNotFound):
                await manager.lease(name)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: backend.open_bytes == 2)
        kept.release()


async def test_requests_of_a_removed_model_end_when_they_take_too_long() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny()}), backend) as manager:
        reading = asyncio.create_task(read(await endless(manager, "m")))
        await change(ModelChanger(manager), settings_of({}, drain_s=0.05))

        with pytest.raises(ModelUnloaded):
            await reading
        await until(lambda: backend.open_bytes == 0)


async def test_changed_model_is_loaded_beside_the_old_one_which_serves_until_then() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(2)}, budget=5), backend) as manager:
        old = await endless(manager, "m")
        reading = asyncio.create_task(read(old))
        await change(ModelChanger(manager), settings_of({"m": tiny(3, gate="slow")}, budget=5))
        await until(lambda: manager.room.held_bytes("cpu") == 5)
        async with manager.use("m") as model:
            assert model.engine is old.model.engine
        backend.gates["slow"].set()
        await until(lambda: manager.get("m").engine is not old.model.engine)

        async with manager.use("m") as model:
            assert model.settings.options["size"] == 3
        assert not reading.done(), "its stream goes on"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: backend.open_bytes == 3)
        assert backend.most_bytes == 5


async def test_changed_model_waits_for_the_old_one_where_both_do_not_fit() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny(2, pin=True)}, budget=3), backend) as manager:
        old = await endless(manager, "m")
        reading = asyncio.create_task(read(old))
        await change(ModelChanger(manager), settings_of({"m": tiny(3, pin=True)}, budget=3))
        await until(lambda: manager.statuses()[0].state == "loading")
        asked = [asyncio.create_task(manager.lease("m")) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in asked) and not reading.done()
        reading.cancel()
        leases = await asyncio.gather(*asked)

        assert {lease.model.settings.options["size"] for lease in leases} == {3}
        assert backend.most_bytes == 3
        for lease in leases:
            lease.release()


async def test_requests_that_wait_for_a_model_get_its_successor() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(2, gate="slow")}, budget=3), backend) as manager:
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: states(manager) == {"m": "loading"})
        await change(ModelChanger(manager), settings_of({"m": tiny(3)}, budget=3))
        backend.gates["slow"].set()
        lease = await asked

        assert lease.model.settings.options["size"] in (2, 3)  # the load had begun: both are an answer
        lease.release()
        await until(lambda: manager.find("m").settings.options["size"] == 3)
        async with manager.use("m") as model:
            assert model.settings.options["size"] == 3


async def test_successor_leaves_the_room_to_a_model_that_waits_for_it() -> None:
    """A change comes while the model of the old settings has not got its memory yet: it gets it first."""
    models = {"other": tiny(3, gate="slow"), "m": tiny(2)}
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of(models, budget=3), backend) as manager:
        other = asyncio.create_task(manager.lease("other"))
        await until(lambda: manager.room.held_bytes("cpu") == 3)
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: manager.find("other").is_leaving)
        await change(ModelChanger(manager), settings_of({"other": models["other"], "m": tiny(1)}, budget=4))
        backend.gates["slow"].set()
        (await other).release()
        lease = await asked

        assert lease.model.settings.options["size"] in (1, 2)
        lease.release()
        await until(lambda: manager.find("m").settings.options["size"] == 1)
        async with manager.use("m") as model:
            assert model.settings.options["size"] == 1


@pytest.mark.parametrize("budget", [9, 2], ids=["beside each other", "one after the other"])
async def test_next_change_does_not_hurry_what_still_runs(budget: int) -> None:
    async with open_tiny(settings_of({"m": tiny(2)}, budget=budget)) as manager:
        lease = await endless(manager, "m")
        reading = asyncio.create_task(read(lease))
        changer = ModelChanger(manager)
        for _ in range(3):
            for slots in (3, 4):
                await change(changer, settings_of({"m": tiny(2, slots=slots)}, budget=budget))
                await asyncio.sleep(0.02)

        assert not reading.done()
        lease.release()
        await until(lambda: states(manager) == {"m": "ready"} and manager.find("m").settings.slots == 4)
        reading.cancel()


async def test_successor_that_had_to_make_way_takes_its_place_all_the_same() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(1)}, budget=4), backend) as manager:
        old = await endless(manager, "m")
        changer = ModelChanger(manager)
        await change(changer, settings_of({"m": tiny(2, gate="slow")}, budget=4))
        await until(lambda: manager.room.held_bytes("cpu") == 3)
        (new,) = set(manager.room.holders) - {manager.find("m")}
        making_way = asyncio.create_task(new.evict(10.0))
        await asyncio.sleep(0)
        backend.gates["slow"].set()

        assert await making_way
        await until(lambda: manager.find("m") is new)
        async with manager.use("m") as model:
            assert model.settings.options["size"] == 2
        old.release()


async def test_successor_that_fails_leaves_the_old_model_in_its_place() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny(load="eager")}), backend) as manager:
        with manager.events.subscribe() as subscription:
            await change(ModelChanger(manager), settings_of({"m": tiny(2, fails="damaged", load="eager")}))
            async for event in subscription:
                if event.kind == "failed":
                    break
        await until(lambda: manager.statuses()[0].error is not None)

        assert "could not be loaded, so the old one stays: damaged" in str(manager.statuses()[0].error)
        async with manager.use("m") as model:
            assert model.settings.options["size"] == 1
        await until(lambda: backend.open_bytes == 1)
        assert manager.room.held_bytes("cpu") == 1


async def test_a_change_overtakes_one_that_is_still_loading() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(1, load="eager")}), backend) as manager:
        changer = ModelChanger(manager)
        await change(changer, settings_of({"m": tiny(2, gate="slow", load="eager")}))
        await until(lambda: manager.room.held_bytes("cpu") == 3)
        await change(changer, settings_of({"m": tiny(3, load="eager")}))
        threading.Timer(0.05, backend.gates["slow"].set).start()
        await until(lambda: manager.get("m").settings.options["size"] == 3)
        await until(lambda: manager.room.held_bytes("cpu") == 3)

        assert backend.open_bytes == 3


@pytest.mark.parametrize("is_there", [False, True], ids=["while it loads", "when it is there"])
async def test_a_change_may_be_taken_back(is_there: bool) -> None:
    """What a change does is known when it is made: what the last one has loaded may be there since it was planned."""
    backend = TinyBackend(gates={"slow": threading.Event()})
    before = settings_of({"m": tiny(1, load="eager")})
    async with open_tiny(before, backend) as manager:
        changer = ModelChanger(manager)
        await change(changer, settings_of({"m": tiny(2, gate="slow", load="eager")}))
        await until(lambda: manager.room.held_bytes("cpu") == 3)
        planned = await changer.plan(before)
        if is_there:
            backend.gates["slow"].set()
            await until(lambda: manager.get("m").settings.options["size"] == 2)
        changes = changer.apply(planned)
        backend.gates["slow"].set()
        await until(lambda: backend.open_bytes == manager.room.held_bytes("cpu") == 1)

        assert (changes.replaced, changes.kept) == ((("m",), ()) if is_there else ((), ("m",)))
        async with manager.use("m") as model:
            assert model.settings.options["size"] == 1


@attrs.define(eq=False)
class _SlowToPlan(TinyBackend):
    """The first plan waits for ``gate``."""

    gate: threading.Event = attrs.field(factory=threading.Event)
    is_planning: bool = False

    def probe(self) -> Probe:
        is_first, self.is_planning = not self.is_planning, True
        assert not is_first or self.gate.wait(60)
        return super().probe()


async def test_change_during_the_start_leaves_nothing_of_the_old_settings() -> None:
    backend = _SlowToPlan()
    manager = ModelManager(settings_of({"m": tiny(1, load="eager")}), registry_of(backend))
    starting = asyncio.create_task(manager.start())
    await until(lambda: backend.is_planning)
    await change(ModelChanger(manager), settings_of({"m": tiny(2, load="eager")}))
    backend.gate.set()
    await starting
    await until(lambda: states(manager) == {"m": "ready"})

    assert manager.get("m").settings.options["size"] == 2
    await until(lambda: backend.open_bytes == manager.room.held_bytes("cpu") == 2)
    await manager.close()


async def test_request_that_came_before_the_start_was_done_gets_the_successor() -> None:
    backend = _SlowToPlan()
    manager = ModelManager(settings_of({"m": tiny(1)}), registry_of(backend))
    starting = asyncio.create_task(manager.start())
    await until(lambda: backend.is_planning)
    asked = asyncio.create_task(manager.lease("m"))
    await change(ModelChanger(manager), settings_of({"m": tiny(2)}))
    backend.gate.set()
    await starting

    assert (await asked).model.settings.options["size"] == 2
    assert backend.open_bytes == 2
    await manager.close()


async def test_order_to_load_a_model_loads_its_successor() -> None:
    backend = _SlowToPlan(is_planning=True)
    async with open_tiny(settings_of({"m": tiny(1)}), backend) as manager:
        backend.is_planning = False
        loading = asyncio.create_task(load_model(manager, "m"))
        await until(lambda: backend.is_planning)
        await change(ModelChanger(manager), settings_of({"m": tiny(2)}))
        await asyncio.sleep(0.02)
        backend.gate.set()
        status = await loading

        assert (status.state, status.memory_bytes) == ("ready", 2)
        assert backend.open_bytes == 2


async def test_order_that_waits_for_a_load_is_told_of_the_successor() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(2, gate="slow")}, budget=3), backend) as manager:
        loading = asyncio.create_task(load_model(manager, "m"))
        await until(lambda: states(manager) == {"m": "loading"})
        await change(ModelChanger(manager), settings_of({"m": tiny(3)}, budget=3, drain_s=0.02))
        await until(lambda: manager.find("m").num_waiting == 1 or loading.done())
        await asyncio.sleep(0.05)
        backend.gates["slow"].set()
        status = await loading

        assert (status.state, status.memory_bytes) == ("ready", 3)


@pytest.mark.parametrize("after", [{"m": tiny()}, {}], ids=["replaced", "removed"])
async def test_download_of_a_model_that_leaves_is_stopped(monkeypatch, after: Mapping[str, ModelSettings]) -> None:
    is_stopped = asyncio.Event()

    async def download(hub: object, text: str, on_share: OnShare) -> None:
        on_share(0.5, "downloading")
        try:
            await asyncio.Event().wait()
        finally:
            is_stopped.set()

    monkeypatch.setattr("enginehouse.serving.manager.download", download)
    monkeypatch.setattr(
        "enginehouse.serving.manager.missing_download", lambda source, _: "hub" if source == "far" else None
    )
    settings = evolve(settings_of({"m": tiny(source="far")}), server=ServerSettings(pull=True))
    manager = ModelManager(settings, registry_of(TinyBackend()))
    await manager.start()
    await until(lambda: states(manager) == {"m": "loading"})
    await change(ModelChanger(manager), settings_of(after))
    async with asyncio.timeout(60):
        await is_stopped.wait()

    await until(lambda: states(manager) == dict.fromkeys(after, "unloaded"))
    await manager.close()


@pytest.mark.parametrize("load", ["eager", "lazy"])
async def test_who_waits_for_a_load_that_was_not_started_waits_for_its_successor(
    load: Literal["eager", "lazy"],
) -> None:
    async with open_tiny(settings_of({"m": tiny(1), "n": tiny(1)})) as manager:
        for name in ("m", "n"):
            manager.find(name).report_download(0.5, "downloading")
        waiting = {name: asyncio.create_task(load_model(manager, name)) for name in ("m", "n")}
        await until(lambda: manager.find("m").num_waiting == manager.find("n").num_waiting == 1)
        await change(ModelChanger(manager), settings_of({"m": tiny(2, load=load)}))

        assert (await waiting["m"]).memory_bytes == 2
        with pytest.raises(ModelNotFound):
            await waiting["n"]


async def test_removed_model_finishes_its_requests_whoever_was_less_patient() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny()}), backend) as manager:
        reading = asyncio.create_task(read(await endless(manager, "m")))
        order = asyncio.create_task(unload_model(manager, "m", drain=True, drain_s=0.05))
        await until(lambda: states(manager) == {"m": "draining"})
        await change(ModelChanger(manager), settings_of({}))
        with pytest.raises(ModelConflict, match="still answers"):
            await order
        await asyncio.sleep(0.05)

        assert not reading.done()
        reading.cancel()
        await until(lambda: backend.open_bytes == 0)


async def test_pinned_model_that_leaves_holds_its_place_against_nobody() -> None:
    async with open_tiny(settings_of({"old": tiny(2, pin=True)}, budget=3)) as manager:
        reading = asyncio.create_task(read(await endless(manager, "old")))
        await change(ModelChanger(manager), settings_of({"new": tiny(2, pin=True, load="eager")}, budget=3))
        await until(lambda: states(manager) != {"new": "loading"})
        asked = asyncio.create_task(manager.lease("new"))
        await asyncio.sleep(0.02)
        assert not asked.done()
        reading.cancel()

        assert (await asked).model.name == "new"


async def test_settings_that_need_no_worker_hold_at_once() -> None:
    async with open_tiny(settings_of({"m": tiny(load="eager")})) as manager:
        engine = manager.get("m").engine
        await change(ModelChanger(manager), settings_of({"m": tiny(load="eager", aliases=("new-name",), ttl=0.05)}))

        assert manager.get("new-name").engine is engine
        await until(lambda: states(manager) == {"m": "unloaded"})


async def test_end_of_the_server_closes_what_is_about_to_be_served() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(1, load="eager")}), backend) as manager:
        changer = ModelChanger(manager)
        await change(changer, settings_of({"m": tiny(2, gate="slow", load="eager")}))
        await until(lambda: manager.room.held_bytes("cpu") == 3)
        await change(changer, settings_of({"m": tiny(3, gate="slow", load="eager")}))
        await until(lambda: manager.room.held_bytes("cpu") == 6)
        threading.Timer(0.1, backend.gates["slow"].set).start()

    assert (backend.open_bytes, manager.room.held_bytes("cpu")) == (0, 0)


def told_of(events: Sequence[ModelEvent], instance: int) -> list[str]:
    """What is told of one of the models that had the same name; repetitions once."""
    return [kind for kind, _ in itertools.groupby(event.kind for event in events if event.instance == instance)]


@pytest.mark.parametrize("budget", [9, 2], ids=["beside each other", "one after the other"])
async def test_events_of_a_replaced_model_are_told_from_those_of_its_successor(budget: int) -> None:
    async with open_tiny(settings_of({"m": tiny(2, load="eager")}, budget=budget)) as manager:
        old = manager.find("m").status().instance
        reading = asyncio.create_task(read(await endless(manager, "m")))
        with manager.events.subscribe() as subscription, manager.events.subscribe() as drain:
            await change(ModelChanger(manager), settings_of({"m": tiny(2, slots=3, load="eager")}, budget=budget))
            await until(lambda: manager.find("m").status().instance != old)
            async for event in drain:  # it is told of a moment after it has begun
                if event.kind == "draining":
                    break
            reading.cancel()
            await until(lambda: states(manager) == {"m": "ready"} and manager.room.held_bytes("cpu") == 2)
        events = all_events(subscription.next)
        new = manager.find("m").status().instance

        assert {event.model for event in events} == {"m"}
        assert told_of(events, old) == ["draining", "unloaded"]
        loaded = ["loading", "ready"]
        assert told_of(events, new) == ([*loaded, "replaced"] if budget == 9 else ["replaced", *loaded])


async def test_events_of_a_model_that_does_not_get_its_place_are_not_those_of_the_one_that_serves() -> None:
    async with open_tiny(settings_of({"m": tiny(load="eager")})) as manager:
        serving = manager.find("m").status().instance
        with manager.events.subscribe() as subscription:
            await change(ModelChanger(manager), settings_of({"m": tiny(fails="no luck"), "new": tiny()}))
            await until(lambda: manager.find("m").status().error is not None)
        events = all_events(subscription.next)
        (failed,) = (event.instance for event in events if event.kind == "failed")
        new = manager.find("new").status().instance

        assert told_of(events, serving) == []
        assert told_of(events, failed) == ["loading", "failed"]
        assert told_of(events, new) == ["added"]


async def test_change_that_is_planned_when_the_server_ends_changes_nothing() -> None:
    backend = _SlowToPlan(is_planning=True)
    async with open_tiny(settings_of({"m": tiny(1, load="eager")}), backend) as manager:
        backend.is_planning = False
        planning = asyncio.create_task(
            ModelChanger(manager).plan(settings_of({"m": tiny(2), "new": tiny(load="eager")}))
        )
        await until(lambda: backend.is_planning)
    backend.gate.set()
    planned = await planning
    with pytest.raises(ServerStopping):
        ModelChanger(manager).apply(planned)
    await asyncio.sleep(0.05)

    assert (backend.num_opened, backend.open_bytes, manager.room.held_bytes("cpu")) == ({"m": 1}, 0, 0)
    assert list(manager.models) == ["m"]


async def test_what_is_started_while_the_server_ends_is_ended_too() -> None:
    """One of the things that closing ends may begin another one, which closing is not to leave behind."""
    begun: list[asyncio.Task[None]] = []

    async def wait(*, is_last: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if not is_last:
                begun.append(asyncio.create_task(wait(is_last=True)))
                manager.run(begun[0])

    async with open_tiny(settings_of({"m": tiny(1)})) as manager:
        manager.run(asyncio.create_task(wait(is_last=False)))
        await asyncio.sleep(0)

    assert begun[0].cancelled()


async def test_failed_model_gets_another_chance() -> None:
    settings = settings_of({"m": tiny(fails="no luck", load="eager"), "other": tiny()})
    async with open_tiny(settings) as manager:
        assert states(manager)["m"] == "failed"
        settings.models["m"].options["fails"] = ""
        await change(ModelChanger(manager), settings)
        await until(lambda: states(manager)["m"] == "ready")


async def test_plans_that_cannot_be_made_refuse_the_whole_change() -> None:
    async with open_tiny(settings_of({"m": tiny(load="eager")})) as manager:
        changer = ModelChanger(manager)
        wrong = {"m": tiny(), "new": evolve(tiny(), options={"sise": 1})}
        with pytest.raises(ConfigError, match=r"models\.new\.sise.*'size'"):
            await changer.plan(settings_of(wrong))
        with pytest.raises(ConfigError, match=r"models\.new\.backend: unknown backend 'none'"):
            await changer.plan(settings_of({"new": evolve(tiny(), backend="none")}))

        assert states(manager) == {"m": "ready"}


async def test_smaller_budget_holds_for_the_next_load() -> None:
    models = {"a": tiny(2), "b": tiny(2)}
    async with open_tiny(settings_of(models, budget=4)) as manager:
        for name in models:
            async with manager.use(name):
                pass
        await change(ModelChanger(manager), settings_of({**models, "c": tiny(2)}, budget=2))
        assert states(manager) == {"a": "ready", "b": "ready", "c": "unloaded"}
        async with manager.use("c"):
            assert states(manager) == {"a": "unloaded", "b": "unloaded", "c": "ready"}
