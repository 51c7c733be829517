"""What an operator asks of models, and which conflicts are refused; events tell of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading

import pytest

from enginehouse.contract.errors import ModelConflict, ModelLoadError, ModelNotFound, ModelUnloaded
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.serving.changing import load_model, unload_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.waiting import until

from .tiny import TinyBackend, all_events, endless, open_tiny, read, settings_of, states, tiny


async def test_load_and_unload_are_idempotent() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"org/m:tag": tiny()}), backend) as manager:
        for _ in range(2):
            assert (await load_model(manager, "org/m:tag")).state == "ready"
        assert backend.open_bytes == 1
        for _ in range(2):
            assert (await unload_model(manager, "org/m:tag")).state == "unloaded"

        assert (backend.num_opened, backend.open_bytes) == ({"org/m:tag": 1}, 0)
        with pytest.raises(ModelNotFound):
            await load_model(manager, "org/m")


async def test_loading_twice_at_once_is_one_load() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow")}), backend) as manager:
        loads = [asyncio.create_task(load_model(manager, "m")) for _ in range(3)]
        await until(lambda: states(manager) == {"m": "loading"})
        with pytest.raises(ModelConflict, match="is loading; use force"):
            await unload_model(manager, "m")
        backend.gates["slow"].set()

        assert [status.state for status in await asyncio.gather(*loads)] == ["ready"] * 3
        assert backend.num_opened == {"m": 1}


async def test_force_stops_a_load_and_those_who_wait_are_told() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow")}), backend) as manager:
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: states(manager) == {"m": "loading"})
        threading.Timer(0.05, backend.gates["slow"].set).start()
        await unload_model(manager, "m", force=True)

        with pytest.raises(ModelUnloaded):
            await asked
        assert (states(manager), backend.open_bytes) == ({"m": "unloaded"}, 0)


async def test_busy_model_is_not_unloaded_without_a_word_about_its_requests() -> None:
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        lease = await endless(manager, "m")
        reading = asyncio.create_task(read(lease))
        with pytest.raises(ModelConflict, match="answers 1 requests; use drain"):
            await unload_model(manager, "m")
        with pytest.raises(ModelConflict, match="still answers requests, so it stays"):
            await unload_model(manager, "m", drain=True, drain_s=0.02)
        assert states(manager) == {"m": "ready"}
        draining = asyncio.create_task(unload_model(manager, "m", drain=True))
        await until(lambda: states(manager) == {"m": "draining"})
        for order in (load_model(manager, "m"), unload_model(manager, "m")):
            with pytest.raises(ModelConflict, match="being unloaded"):
                await order
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

        assert (await draining).state == "unloaded"


async def test_force_ends_requests_with_an_error_that_says_why() -> None:
    async with open_tiny(settings_of({"m": tiny(pin=True)})) as manager:
        reading = asyncio.create_task(read(await endless(manager, "m")))
        draining = asyncio.create_task(unload_model(manager, "m", force=True, drain=True, drain_s=60))
        await until(lambda: states(manager) == {"m": "draining"})
        assert (await unload_model(manager, "m", force=True)).state == "unloaded"
        with pytest.raises(ModelUnloaded, match="'m' was unloaded"):
            await reading
        await draining


async def test_force_insists_after_a_drain_that_does_not() -> None:
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        reading = asyncio.create_task(read(await endless(manager, "m")))
        draining = asyncio.create_task(unload_model(manager, "m", drain=True, drain_s=0.05))
        await until(lambda: states(manager) == {"m": "draining"})
        assert (await unload_model(manager, "m", drain=True, force=True, drain_s=0.05)).state == "unloaded"

        with pytest.raises(ModelUnloaded):
            await reading
        with pytest.raises(ModelConflict, match="still answers"):
            await draining


async def test_pinned_model_is_unloaded_by_force_only() -> None:
    async with open_tiny(settings_of({"m": tiny(pin=True, load="eager")})) as manager:
        with pytest.raises(ModelConflict, match="is pinned; use force"):
            await unload_model(manager, "m", drain=True)
        assert (await unload_model(manager, "m", force=True)).state == "unloaded"


async def test_failed_model_gets_another_chance() -> None:
    settings = settings_of({"m": tiny(fails="no luck")})
    async with open_tiny(settings) as manager:
        with pytest.raises(ModelLoadError, match="no luck"):
            await load_model(manager, "m")
        assert states(manager) == {"m": "failed"}
        manager.find("m").settings.options["fails"] = ""
        assert (await load_model(manager, "m")).state == "ready"


async def test_events_tell_the_life_of_a_model() -> None:
    async with open_tiny(settings_of({"a": tiny(2), "b": tiny(2)}, budget=3)) as manager:
        with manager.events.subscribe() as subscription, manager.events.subscribe() as drain:
            lease = await endless(manager, "a")
            other = asyncio.create_task(manager.lease("b"))
            async for event in drain:
                if event.kind == "draining":
                    break
            lease.end(ModelUnloaded("enough"))
            (await other).release()
        kinds = [(event.model, event.kind) for event in all_events(subscription.next)]

        told = [step for step, _ in itertools.groupby(kinds)]
        assert told == [
            ("a", "loading"),
            ("a", "ready"),
            ("b", "loading"),
            ("a", "draining"),
            ("a", "unloaded"),
            ("b", "loading"),
            ("b", "ready"),
        ]


async def test_slow_listener_loses_the_oldest_events_and_knows_how_many() -> None:
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        with manager.events.subscribe() as subscription:
            for _ in range(300):
                await load_model(manager, "m")
                await unload_model(manager, "m")
        events = all_events(subscription.next)

        assert len(events) == 1000
        assert subscription.num_lost > 0
        assert events[-1].kind == "unloaded"


async def test_death_and_restart_of_a_worker_are_told() -> None:
    model = ModelSettings(source="fake", backend="fake", isolation="process")
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()))
    manager = ModelManager(settings, PluginRegistry.for_settings(settings))
    try:
        await manager.start()
        await manager.wait_settled(30)
        with manager.events.subscribe() as subscription:
            pid = manager.get("m").engine.pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
            told = []
            async with asyncio.timeout(30):
                async for event in subscription:
                    told.append(event)
                    if event.kind == "restarted":
                        break
    finally:
        await manager.close()

    assert "SIGKILL" in told[0].text
    assert [kind for kind, _ in itertools.groupby(event.kind for event in told)] == [
        "restarting",
        "loading",
        "restarted",
    ]
