"""Lazy models: one load for all who ask, in order, with clear errors; what the start of a server loads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal

import pytest

from enginehouse.contract.backend import ModelSource, Progress
from enginehouse.contract.errors import (
    EngineDead,
    InsufficientMemory,
    ModelLoadError,
    ModelNotFound,
    ModelNotReady,
    ModelOverloaded,
    ModelTooLarge,
    ModelUnloaded,
    ServerStopping,
)
from enginehouse.serving import ModelManager
from enginehouse.serving.changing import load_model, unload_model
from enginehouse.serving.leases import Waiters
from enginehouse.serving.sources import OnShare
from enginehouse_testkit.scripted import ScriptedEngine
from enginehouse_testkit.waiting import until

from .tiny import TinyBackend, TinyOptions, open_tiny, registry_of, settings_of, states, tiny


async def test_a_hundred_first_requests_are_one_load() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow", aliases=("alias",))}), backend) as manager:
        asked = [asyncio.create_task(manager.lease("alias" if n % 2 else "m")) for n in range(100)]
        await until(lambda: manager.statuses()[0].num_waiting == 100)
        assert states(manager) == {"m": "loading"}
        for task in asked[:40]:
            task.cancel()
        backend.gates["slow"].set()
        leases = await asyncio.gather(*asked, return_exceptions=True)

        assert backend.num_opened == {"m": 1}
        assert [isinstance(lease, asyncio.CancelledError) for lease in leases] == [True] * 40 + [False] * 60
        assert manager.statuses()[0].num_running == 60
        for lease in leases[40:]:
            lease.release()
            lease.release()
        assert manager.statuses()[0].num_running == 0


async def test_load_goes_on_when_everybody_who_waited_has_left() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow")}), backend) as manager:
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: states(manager) == {"m": "loading"})
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        backend.gates["slow"].set()
        await until(lambda: states(manager) == {"m": "ready"})

        (await manager.lease("m")).release()
        assert backend.num_opened == {"m": 1}


async def test_request_that_waits_too_long_is_told_when_to_come_back() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow")}, load_wait_s=0.05), backend) as manager:
        with pytest.raises(ModelNotReady, match="'m' is loading") as refused:
            await manager.lease("m")
        backend.gates["slow"].set()

        assert refused.value.retry_after_s >= 1
        assert manager.statuses()[0].num_waiting == 0
        await until(lambda: states(manager) == {"m": "ready"})


async def test_only_so_many_requests_wait_as_the_model_could_hold() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow", slots=2)}, max_queue=3), backend) as manager:
        asked = [asyncio.create_task(manager.lease("m")) for _ in range(5)]
        await until(lambda: manager.statuses()[0].num_waiting == 5)
        with pytest.raises(ModelOverloaded, match="5 requests wait for the model 'm'"):
            await manager.lease("m")
        backend.gates["slow"].set()

        for lease in await asyncio.gather(*asked):
            lease.release()


async def test_load_that_fails_is_told_to_all_who_wait_and_to_those_who_come_later() -> None:
    async with open_tiny(settings_of({"m": tiny(fails="damaged file"), "other": tiny()})) as manager:
        outcomes = await asyncio.gather(*(manager.lease("m") for _ in range(5)), return_exceptions=True)
        with pytest.raises(ModelLoadError, match="damaged file"):
            await manager.lease("m")

        assert all(isinstance(error, ModelLoadError) for error in outcomes)
        async with manager.use("other") as model:
            assert model.name == "other"


async def test_model_that_cannot_be_loaded_again_fails_at_once() -> None:
    settings = settings_of({"m": tiny(load="eager")})
    async with open_tiny(settings) as manager:
        await unload_model(manager, "m")
        plan = manager.find("m").plan
        assert plan is not None
        plan.options["fails"] = "the file is gone"
        with pytest.raises(ModelLoadError, match="could not be loaded: the file is gone"):
            await manager.lease("m")
        assert manager.statuses()[0].num_restarts == 0


class Refusing(TinyBackend):
    """Raises one error after the other."""

    errors = [EngineDead("it died"), InsufficientMemory("no memory")]

    def open(self, source: ModelSource, options: TinyOptions, progress: Progress) -> ScriptedEngine:
        raise self.errors.pop(0)


async def test_memory_that_is_missing_at_a_restart_fails_the_model() -> None:
    """Only a first load is put off until memory is free: requests wait for it."""
    async with open_tiny(settings_of({"m": tiny(load="eager")}), Refusing()) as manager:
        (status,) = manager.statuses()

    assert (status.state, status.error) == ("failed", "no memory")


async def test_unknown_model_loads_nothing() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny()}), backend) as manager:
        with pytest.raises(ModelNotFound):
            await manager.lease("n")

        assert backend.num_opened == {}


async def test_start_loads_as_many_eager_models_as_fit_and_pinned_ones_first() -> None:
    models = {
        "first": tiny(3, load="eager"),
        "second": tiny(3, load="eager"),
        "lazy": tiny(1),
        "pinned": tiny(2, load="eager", pin=True),
    }
    backend = TinyBackend()
    async with open_tiny(settings_of(models, budget=5), backend) as manager:
        assert states(manager) == {"first": "ready", "second": "unloaded", "lazy": "unloaded", "pinned": "ready"}
        async with manager.use("second"):
            assert states(manager) == {"first": "unloaded", "second": "ready", "lazy": "unloaded", "pinned": "ready"}

        assert backend.most_bytes == 5


async def test_model_that_never_fits_is_refused_with_need_budget_and_holders() -> None:
    models = {"big": tiny(2048), "kept": tiny(512, load="eager", pin=True), "huge": tiny(1024**3, load="eager")}
    async with open_tiny(settings_of(models, budget=2048)) as manager:
        with pytest.raises(ModelTooLarge) as refused:
            await manager.lease("big")

        message = refused.value.message
        assert "'big' needs 2.0 KiB of memory (cpu)" in message
        assert "the budget is 2.0 KiB (limits.memory_budget)" in message
        assert "'kept' holds 512 B (pinned)" in message
        big, _, huge = manager.statuses()
        assert (big.state, huge.state) == ("unloaded", "failed")
        assert "1.0 GiB" in str(huge.error)


async def test_model_waits_for_a_busy_one_and_is_refused_when_that_takes_too_long() -> None:
    models = {"a": tiny(2), "b": tiny(2)}
    async with open_tiny(settings_of(models, budget=3, drain_s=0.05)) as manager:
        held = await manager.lease("a")
        with pytest.raises(InsufficientMemory, match=r"'a' holds 2 B; 'a' was busy for 0.05 s"):
            await manager.lease("b")
        assert states(manager) == {"a": "ready", "b": "unloaded"}
        async with manager.use("a"):  # it goes on being served
            pass
        held.release()
        async with manager.use("b"):
            assert states(manager) == {"a": "unloaded", "b": "ready"}


async def test_requests_for_a_model_that_makes_way_wait_and_get_it_back() -> None:
    backend = TinyBackend()
    async with open_tiny(settings_of({"a": tiny(2), "b": tiny(2)}, budget=3), backend) as manager:
        held = await manager.lease("a")
        other = asyncio.create_task(manager.lease("b"))
        await until(lambda: states(manager)["a"] == "draining")
        late = asyncio.create_task(manager.lease("a"))
        await asyncio.sleep(0.02)
        assert not late.done() and not other.done()
        held.release()
        (await other).release()
        lease = await late

        assert lease.model.name == "a"
        assert backend.num_opened == {"a": 2, "b": 1}
        lease.release()


async def test_model_that_goes_on_serving_leaves_when_nobody_happens_to_use_it() -> None:
    models = {"a": tiny(2, draining="serve"), "b": tiny(2)}
    async with open_tiny(settings_of(models, budget=3)) as manager:
        held = await manager.lease("a")
        other = asyncio.create_task(manager.lease("b"))
        await until(lambda: states(manager)["a"] == "draining")
        async with asyncio.timeout(60):
            async with manager.use("a"):
                held.release()
                await asyncio.sleep(0.01)
                assert not other.done()
        (await other).release()


async def test_least_recently_used_idle_models_leave_first_and_only_as_many_as_needed() -> None:
    models = {name: tiny(2) for name in "abc"} | {"d": tiny(4), "small": tiny(1)}
    async with open_tiny(settings_of(models, budget=7)) as manager:
        for name in ("a", "b", "c", "a"):
            async with manager.use(name):
                pass
        async with manager.use("d"):
            ready = {name for name, state in states(manager).items() if state == "ready"}
            assert ready == {"a", "d"}
        async with manager.use("small"):
            assert states(manager)["a"] == "ready"


async def test_model_without_requests_is_unloaded_after_its_time() -> None:
    async with open_tiny(settings_of({"m": tiny(ttl=0.05), "kept": tiny(load="eager")})) as manager:
        lease = await manager.lease("m")
        await asyncio.sleep(0.15)
        assert states(manager)["m"] == "ready"
        lease.release()
        await until(lambda: states(manager)["m"] == "unloaded")

        assert states(manager)["kept"] == "ready"
        async with manager.use("m"):
            pass


async def test_devices_have_budgets_of_their_own() -> None:
    models = {"ram": tiny(2), "gpu-1": tiny(9, device="cuda:0"), "gpu-2": tiny(9, device="cuda:0")}
    async with open_tiny(settings_of(models, budget=2)) as manager:
        for name in models:
            async with manager.use(name):
                pass

        assert set(states(manager).values()) == {"ready"}
        assert manager.room.held_bytes("cuda:0") == 18


async def test_requests_that_wait_are_told_when_the_server_stops() -> None:
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with contextlib.AsyncExitStack() as stack:
        manager = await stack.enter_async_context(open_tiny(settings_of({"m": tiny(gate="slow")}), backend))
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: states(manager) == {"m": "loading"})
        threading.Timer(0.05, backend.gates["slow"].set).start()
    with pytest.raises(ServerStopping):
        await asked
    assert backend.open_bytes == 0


async def test_load_of_an_engine_that_does_not_get_on_is_given_up() -> None:
    """Its thread cannot be ended; what it opens in the end is closed."""
    backend = TinyBackend(gates={"slow": threading.Event()})
    async with open_tiny(settings_of({"m": tiny(gate="slow", load_timeout_s=0.2)}), backend) as manager:
        with pytest.raises(
            ModelLoadError, match=r"'growing' at 50%; if it needs longer, raise models\.m\.load_timeout_s"
        ):
            await manager.lease("m")
        assert states(manager) == {"m": "failed"}
        backend.gates["slow"].set()
        await until(lambda: backend.num_opened == {"m": 1} and backend.open_bytes == 0)


async def test_model_that_was_taken_out_is_not_loaded_any_more() -> None:
    """Somebody was about to load it."""
    backend = TinyBackend()
    async with open_tiny(settings_of({"m": tiny(load="lazy"), "n": tiny(load="eager")}), backend) as manager:
        gone = manager.find("m")
        await gone.close()
        gone.begin(manager.settings, on_demand=True)
        evolved = tiny(load="eager")
        gone.use_settings(evolved)
        await manager.begin_eager([gone])

        assert not gone.is_serving
        assert manager.room.footprint(gone) is None
        with pytest.raises(ModelUnloaded, match="not served any more"):
            await gone.lease(None)
        assert "m" not in backend.num_opened


async def test_download_that_stops_in_an_unknown_way_fails_its_model(monkeypatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("enginehouse.serving.manager.download", broken)
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        model = manager.make("d", tiny())
        await manager._download(model, None)

        assert model.state == "failed"
        assert model.status().error == "Downloading the model d failed: RuntimeError: a bug"


@pytest.mark.parametrize("load", ["eager", "lazy"])
async def test_order_to_load_a_model_that_is_put_off_holds(monkeypatch, load: Literal["eager", "lazy"]) -> None:
    """Its files have come, but it is a lazy one, or does not fit beside the others: somebody waits for it already."""
    arrived = asyncio.Event()

    async def download(hub: object, text: str, on_share: OnShare) -> None:
        on_share(0.5, "downloading")
        await arrived.wait()

    monkeypatch.setattr("enginehouse.serving.manager.download", download)
    models = {"other": tiny(2, load="eager"), "m": tiny(2)}
    async with open_tiny(settings_of(models, budget=3)) as manager:
        model = manager.find("m")
        model.use_settings(tiny(2, load=load))
        manager.begin_download(model, None)
        await until(lambda: states(manager)["m"] == "loading")
        loading = asyncio.create_task(load_model(manager, "m"))
        await until(lambda: model.num_waiting == 1)
        arrived.set()
        async with asyncio.timeout(60):
            assert (await loading).state == "ready"


async def test_engine_is_closed_when_nobody_can_be_told_that_it_is_there() -> None:
    def tell(model: str, share: float, text: str) -> None:
        if text == "ready":
            raise OSError("the terminal is gone")

    backend = TinyBackend()
    manager = ModelManager(settings_of({"m": tiny(load="eager")}), registry_of(backend), tell)
    await manager.start()
    await manager.wait_settled(10)

    assert (states(manager), backend.open_bytes, manager.room.held_bytes("cpu")) == ({"m": "failed"}, 0, 0)
    assert backend.num_opened == {"m": 1}
    await manager.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_load_begins_however_that_ends_what_it_waits_for(is_cancelled: bool) -> None:
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        ended = asyncio.get_running_loop().create_future()
        manager.find("m").begin(manager.settings, on_demand=True, after=ended)
        asked = asyncio.create_task(manager.lease("m"))
        await until(lambda: manager.find("m").num_waiting == 1)
        ended.cancel() if is_cancelled else ended.set_exception(RuntimeError("a bug"))
        async with asyncio.timeout(60):
            (await asked).release()
        assert is_cancelled or isinstance(ended.exception(), RuntimeError)


async def test_force_that_stops_a_load_does_not_stop_what_it_waits_for() -> None:
    async with open_tiny(settings_of({"m": tiny()})) as manager:
        ended = asyncio.get_running_loop().create_future()
        manager.find("m").begin(manager.settings, on_demand=True, after=ended)
        await asyncio.sleep(0.01)
        await unload_model(manager, "m", force=True)

        assert not ended.done()


async def test_no_request_waits_for_a_model_that_is_removed_before_its_load_started() -> None:
    manager = ModelManager(settings_of({"m": tiny(load="eager")}), registry_of(TinyBackend()))
    settled = asyncio.create_task(manager.wait_settled(10))
    await asyncio.sleep(0.01)
    assert not settled.done()
    await manager.find("m").close()
    await asyncio.wait([settled], timeout=60)

    assert settled.done()
    await settled


async def test_who_has_left_waits_nowhere() -> None:
    """Also not where it was moved to; nobody would be loaded for it there."""
    before, after = Waiters[str](), Waiters[str]()
    asked = asyncio.create_task(before.wait(0.05))
    await asyncio.sleep(0)
    before.move_to(after)
    assert (len(before), len(after)) == (0, 1)
    assert await asked is None
    assert len(after) == 0
    assert not after
