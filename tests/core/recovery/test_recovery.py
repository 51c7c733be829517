"""Many requests, real worker processes that are killed at any moment, and not one answer that differs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import string
from collections.abc import AsyncIterator

import pytest

from enginehouse.contract.errors import EngineDead, Overloaded
from enginehouse.contract.types import EngineRequest, RequestFinished, SamplingParams, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.work import State, Work
from enginehouse.serving import ModelManager
from enginehouse.serving.restarts import RestartPolicy
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.limits import LimitsSettings
from enginehouse.workers.process import count_memory_kills
from enginehouse_testkit.waiting import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

Told = tuple[str, tuple[int, ...], int]


class Other(Work):
    """Another quarantined request, which has come far and so is tried last."""

    num_tokens = 1000


@contextlib.asynccontextmanager
async def serving(max_queue: int = 100, **fields) -> AsyncIterator[Server]:
    model = ModelSettings(source="fake", backend="fake", **{"isolation": "process", "slots": 4, **fields})
    limits = LimitsSettings(max_queue=max_queue)
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()), limits=limits)
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05)
    manager = ModelManager(settings, PluginRegistry.load(settings.plugins, builtin=["fake"]), restart_policy=policy)
    try:
        await manager.start()
        await manager.wait_settled(60)
        yield Server(manager, Recovery())
    finally:
        await manager.close()


class Server:
    def __init__(self, manager: ModelManager, recovery: Recovery) -> None:
        self.manager, self.recovery = manager, recovery
        self.num_events = 0
        self._killed: object = None  # the engine of the last worker that was killed

    async def ask(self, number: int, max_tokens: int = 30, stop: tuple[str, ...] = ()) -> Told:
        """The whole answer of a request: text, token ids, and how many tokens it counts."""
        request = EngineRequest(
            request_id=f"r{number}-{random.random()}",
            segments=(Segment(f"story number {number % 5}"),),
            sampling=SamplingParams(temperature=1.0, seed=number),
            stopping=StopParams(max_tokens=max_tokens, ignore_eos=True, stop=stop),
        )
        generation = await self.recovery.start(await self.manager.wait("m"), request)
        text, token_ids, count = "", [], -1
        async for batch in generation:
            for event in batch:
                self.num_events += 1
                assert count < 0, "an event after the last one"
                if isinstance(event, TextDelta):
                    text += event.text
                    token_ids += event.token_ids
                elif isinstance(event, RequestFinished):
                    count = event.usage.completion_tokens
        assert count >= 0, "no last event"
        return text, tuple(token_ids), count

    @property
    def has_quarantined(self) -> bool:
        return any(place.has_quarantined for place in self.recovery._works.values())

    def kill(self, number: int = signal.SIGKILL) -> None:
        loaded = self.manager.find("m").loaded
        if loaded is not None:
            self._killed = loaded.engine
            os.kill(loaded.engine.pid, number)  # type: ignore[attr-defined]

    @property
    def has_worker(self) -> bool:
        """True if a worker serves that has not been killed."""
        loaded = self.manager.find("m").loaded
        return loaded is not None and loaded.engine is not self._killed

    @property
    def place(self) -> ModelWork:
        (place,) = self.recovery._works.values()
        return place


@pytest.mark.skipif(count_memory_kills() is None, reason="the system does not say whom it kills for want of memory")
async def test_request_whose_worker_is_killed_again_is_not_blamed():
    """It is alone in the second worker as well, and has not come further."""
    async with asyncio.timeout(60), serving(options={"step_delay_s": 0.1}) as server:
        asked = asyncio.create_task(server.ask(0, 20))
        await until(lambda: server.num_events >= 3)
        first = server.manager.get("m").engine
        server.kill()
        await until(lambda: server.place._engine is not first)
        seen = server.num_events
        await until(lambda: server.num_events > seen)
        server.kill()

        assert (await asked)[2] == 20


@pytest.mark.parametrize("max_tokens", [8, 9])
async def test_request_that_ends_as_it_passes_its_trial_is_not_told_twice(max_tokens):
    """The last step says several things: visible text, what had been held back, the end."""
    stop = tuple(f"{letter}~" for letter in string.printable)
    async with asyncio.timeout(60), serving(isolation="thread", options={"step_delay_s": 0.05}) as server:
        expected = await server.ask(0, max_tokens, stop)
        asked = asyncio.create_task(server.ask(0, max_tokens, stop))
        await until(lambda: bool(server.place._works))
        (request,) = server.place._works
        quarantine = server.place._quarantine
        await until(lambda: request.stage == "request")
        other = Other("somebody", -1, EngineRequest(request_id="other", token_ids=(97,)), 60.0)
        quarantine.entered(other)
        quarantine.died([request, other])
        quarantine.entered(request)  # it never left this worker
        assert request.state is State.ISOLATED
        await until(lambda: request.state is not State.ISOLATED)
        await asyncio.sleep(0.2)  # it is alone outside, and would stay there
        quarantine.over(other)
        server.place._notify()

        assert await asked == expected


@pytest.mark.parametrize("step_delay_s", [0.0, 0.002])
async def test_answers_of_a_dying_model_are_those_of_a_healthy_one(step_delay_s):
    """Twelve requests of different lengths, the model dies four times under them."""
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 40, 4, 60]
    async with asyncio.timeout(100), serving(options={"step_delay_s": step_delay_s}) as server:
        healthy = await asyncio.gather(*(server.ask(*one) for one in enumerate(lengths)))
        asked = [asyncio.create_task(server.ask(*one)) for one in enumerate(lengths)]
        for _ in range(4):
            goal = server.num_events + 15
            await until(lambda goal=goal: server.num_events >= goal or all(task.done() for task in asked))
            # Work that is alone in a worker that dies is to blame.
            await until(lambda: server.has_worker and not server.has_quarantined)
            server.kill()
        found = await asyncio.gather(*asked)

    assert found == healthy


async def test_cancelled_in_the_pause_ends_at_once_and_others_go_on():
    async with asyncio.timeout(60), serving(options={"step_delay_s": 0.01, "open_delay_s": 1.0}) as server:
        stays, leaves = (asyncio.create_task(server.ask(number, 40)) for number in range(2))
        await until(lambda: server.num_events >= 8)
        engine = server.manager.get("m").engine
        server.kill()
        await engine.died  # type: ignore[attr-defined]
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert not server.has_worker, "it did not wait for the next one"

        assert (await stays)[2] == 40


async def test_crowd_outside_is_bounded_while_work_is_quarantined():
    async with asyncio.timeout(60), serving(0, slots=3, options={"step_delay_s": 0.01, "open_delay_s": 0.5}) as server:
        running = [asyncio.create_task(server.ask(number, 60)) for number in range(3)]
        await until(lambda: server.num_events >= 12)
        model = server.manager.get("m")
        server.kill(signal.SIGABRT)
        await model.engine.died  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="recovering from a crash"):
            await server.recovery.start(model, EngineRequest(request_id="late", token_ids=(97,)))

        assert [told[2] for told in await asyncio.gather(*running)] == [60] * 3


async def test_without_replay_the_request_ends_with_its_worker():
    async with asyncio.timeout(60), serving(replay=False, options={"step_delay_s": 0.01}) as server:
        asked = asyncio.create_task(server.ask(0, 200))
        await until(lambda: server.num_events >= 4)
        server.kill()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await asked


async def test_closing_the_server_is_no_death():
    async with asyncio.timeout(60), serving(options={"step_delay_s": 0.01}) as server:
        asked = asyncio.create_task(server.ask(0, 500))
        await until(lambda: server.num_events >= 4)
        await server.manager.close()
        with pytest.raises(EngineDead, match="shutting down"):
            await asked


async def test_closing_the_server_ends_those_who_wait_for_the_next_worker():
    async with asyncio.timeout(60), serving(options={"step_delay_s": 0.01, "open_delay_s": 2.0}) as server:
        asked = asyncio.create_task(server.ask(0, 500))
        await until(lambda: server.num_events >= 4)
        model = server.manager.get("m")
        server.kill()
        await model.engine.died  # type: ignore[attr-defined]
        await server.manager.close()
        with pytest.raises(EngineDead, match="not served any more"):
            await asked


async def test_reasoning_that_nobody_could_stop_is_not_stopped_in_the_next_worker():
    async with asyncio.timeout(60), serving(isolation="thread", options={"step_delay_s": 0.02}) as server:
        asked = asyncio.create_task(server.ask(0, 20))
        await until(lambda: server.num_events >= 2)
        (request,) = server.place._works
        assert await server.manager.get("m").engine.stop_thinking(request.request.request_id) == 0  # type: ignore[attr-defined]
        resume = request._transcript.begin_stay()
        await asked

        assert resume is not None
        assert not resume.is_thinking_stopped
