"""Models with several workers elsewhere: real processes that are taken away in the middle of answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from enginehouse.contract.errors import ConfigError, EngineDead, RequestKillsWorker
from enginehouse.contract.types import EngineRequest, RequestFinished, SamplingParams, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import ModelManager
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.workers.fleet import FleetEngine
from enginehouse_testkit.fake_fleet import FakePlacement
from enginehouse_testkit.waiting import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")


class Server:
    def __init__(self, manager: ModelManager, recovery: Recovery) -> None:
        self.manager, self.recovery = manager, recovery
        self.num_tokens = 0

    @property
    def fleet(self) -> FleetEngine:
        engine = self.manager.get("m").engine
        assert isinstance(engine, FleetEngine)
        return engine

    async def ask(self, number: int, max_tokens: int = 30, text: str = "story", caller: str = "") -> str:
        request = EngineRequest(
            request_id=f"r{number}-{caller}",
            segments=(Segment(f"{text} {number}"),),
            sampling=SamplingParams(temperature=1.0, seed=number),
            stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
            caller=caller,
        )
        generation = await self.recovery.start(await self.manager.wait("m"), request)
        answer, count = "", -1
        async for batch in generation:
            for event in batch:
                assert count < 0, "an event after the last one"
                if isinstance(event, TextDelta):
                    answer += event.text
                    self.num_tokens += len(event.token_ids)
                elif isinstance(event, RequestFinished):
                    count = event.usage.completion_tokens
        assert count == max_tokens
        return answer


@contextlib.asynccontextmanager
async def serving(
    backend: str = "fake-fleet", model: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    fleet = {"inner": "fake"} if backend == "fake-fleet" else {}
    chosen = ModelSettings(source="fake", backend=backend, slots=32, options={**fleet, **options}, **(model or {}))
    settings = Settings(models={"m": chosen}, plugins=PluginsSettings(allow=()))
    registry = PluginRegistry.load(settings.plugins, builtin=["fake", "fake-fleet"])
    manager = ModelManager(settings, registry)
    try:
        await manager.start()
        await manager.wait_settled(60)
        yield Server(manager, Recovery())
    finally:
        await manager.close()


@pytest.mark.parametrize(
    "event", ["lost", *(pytest.param(event, marks=pytest.mark.slow) for event in ("removed", "killed"))]
)
async def test_answers_are_those_of_one_worker_when_a_replica_is(event: str) -> None:
    async with serving("fake") as server:
        expected = await asyncio.gather(*(server.ask(number) for number in range(20)))
    async with asyncio.timeout(100), serving(step_delay_s=0.02) as server:
        await until(lambda: len(server.fleet.members) == 2)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 60)
        placement = FakePlacement.open["m"]
        place = next(iter(server.fleet.members))
        both_work = all(one.num_open for one in server.fleet.members.values())
        if event == "lost":
            placement.lose(place)
        elif event == "removed":
            await placement.remove(place)
        elif event == "killed":
            os.kill(placement.workers[place].pid, signal.SIGKILL)

        assert both_work
        assert await asyncio.gather(*asked) == expected


@pytest.mark.slow
async def test_cancelled_requests_free_their_slots_of_every_replica() -> None:
    async with asyncio.timeout(60), serving(step_delay_s=0.02) as server:
        await until(lambda: len(server.fleet.members) == 2)
        asked = [asyncio.create_task(server.ask(number, 1000)) for number in range(60)]
        await until(lambda: server.num_tokens > 100)
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)

        async def running() -> int:
            return sum([len((await one.view()).requests) for one in server.fleet.members.values()])

        await until(lambda: not any(one.num_open for one in server.fleet.members.values()))
        assert await running() == 0
        assert all(worker.num_requests == 0 for worker in FakePlacement.open["m"].workers.values())


async def test_request_continues_with_a_replica_that_comes_later_or_ends_after_the_limit() -> None:
    async with asyncio.timeout(60), serving(replicas=1, model={"replay_timeout_s": 0.3}, step_delay_s=0.02) as server:
        placement = FakePlacement.open["m"]
        first = asyncio.create_task(server.ask(0))
        await until(lambda: server.num_tokens > 3)
        await placement.remove("replica-0")
        with pytest.raises(EngineDead, match=r"not back within 0\.3 s; try again"):
            await first
        await placement.add()
        await until(lambda: bool(server.fleet.members))

        assert await server.ask(0)


async def test_request_without_any_replica_counts_as_demand_and_is_served_by_the_first_one() -> None:
    async with asyncio.timeout(60), serving(replicas=1) as server:
        placement = FakePlacement.open["m"]
        assert server.manager.find("m").status().replicas == {"replica-0": 0}
        await placement.remove("replica-0")
        await until(lambda: not server.fleet.members)
        assert server.manager.find("m").status().replicas == {}
        asked = asyncio.create_task(server.ask(0))
        await until(lambda: server.fleet.num_requests == 1)
        await placement.add()

        assert await asked
        assert server.fleet.num_requests == 0


@pytest.mark.slow
async def test_request_that_kills_two_replicas_is_refused_and_others_continue() -> None:
    async with serving("fake") as server:
        expected = await asyncio.gather(*(server.ask(number, 60) for number in range(6)))
    faults = {"abort_at_text": "poison"}
    async with asyncio.timeout(100), serving(replicas=3, step_delay_s=0.02, faults=faults) as server:
        await until(lambda: len(server.fleet.members) == 3)
        asked = [asyncio.create_task(server.ask(number, 60)) for number in range(6)]
        await until(lambda: server.num_tokens > 12)
        with pytest.raises(RequestKillsWorker):
            await server.ask(7, text="poison", caller="ann")

        assert len(server.fleet.members) == 1
        assert await asyncio.gather(*asked) == expected
        with pytest.raises(RequestKillsWorker, match="equal request"):
            await server.ask(7, text="poison", caller="ann")
        assert len(server.fleet.members) == 1


async def test_request_among_others_that_kills_in_the_engine_is_the_one_found() -> None:
    async with serving("fake") as server:
        expected = await asyncio.gather(*(server.ask(number, 40) for number in range(6)))
    faults = {"abort_at_token": ord("~")}
    async with asyncio.timeout(100), serving(replicas=3, step_delay_s=0.02, faults=faults) as server:
        await until(lambda: len(server.fleet.members) == 3)
        asked = [asyncio.create_task(server.ask(number, 40)) for number in range(6)]
        await until(lambda: server.num_tokens > 12)
        with pytest.raises(RequestKillsWorker):
            await server.ask(7, text="~", caller="ann")

        assert await asyncio.gather(*asked) == expected


def test_settings_of_workers_on_this_machine_are_refused_by_name() -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=()), builtin=["fake", "fake-fleet", "scripted"])

    def plan(options: dict[str, Any], **settings: Any) -> None:
        plan_model("m", ModelSettings(source="fake", backend="fake-fleet", options=options, **settings), registry)

    with pytest.raises(ConfigError, match=r"models\.m\.isolation: the backend 'fake-fleet' starts"):
        plan({"inner": "fake"}, isolation="thread")
    with pytest.raises(ConfigError, match=r"models\.m\.inner: the backend 'scripted' opens no model in a worker"):
        plan({"inner": "scripted"})
    with pytest.raises(ConfigError, match=r"models\.m\.replica: unknown setting \(did you mean 'replicas'"):
        plan({"inner": "fake", "replica": 2})
