"""Pooling requests whose workers die: real worker processes of the fake pooler are killed, hang, abort and fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginehouse.contract.errors import (
    EngineDead,
    GenerationFailed,
    Overloaded,
    PluginFailed,
    QueueTimeout,
    RequestKillsWorker,
)
from enginehouse.contract.types import PoolingRequest, PoolingResult, PoolText, Segment
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import ModelManager
from enginehouse.serving.restarts import RestartPolicy
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.limits import ByteCount, LimitsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse_testkit.fake_pooler import FakePooler
from enginehouse_testkit.waiting import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

FATAL = ord("#")
"""Token of the text at which workers die."""


class Server:
    def __init__(self, manager: ModelManager, recovery: Recovery, folder: Path) -> None:
        self.manager, self.recovery, self.folder = manager, recovery, folder
        self._num_asked = 0

    async def pool(self, *texts: str, **fields: Any) -> PoolingResult:
        self._num_asked += 1
        request_id = f"p{self._num_asked}"
        inputs = tuple(map(PoolText, texts))
        request = PoolingRequest(request_id=request_id, model="m", task="embed", inputs=inputs, **fields)
        return await self.recovery.pool(await self.manager.wait("m"), request)

    async def engine(self) -> WorkerEngine:
        engine = (await self.manager.wait("m")).engine
        assert isinstance(engine, WorkerEngine)
        return engine

    async def passes(self, number: int) -> list[list[list[int]]]:
        """Wait until that many passes have begun, and return the token ids of their inputs."""
        await until(lambda: len(self._passes()) >= number)
        return self._passes()

    def _passes(self) -> list[list[list[int]]]:
        file = self.folder / "log"
        return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []

    @contextlib.contextmanager
    def held(self):
        """Passes wait while the block runs."""
        file = self.folder / "hold"
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def serving(folder: Path, faults: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[Server]:
    options = {"log": str(folder / "log"), "hold": str(folder / "hold"), "faults": faults or {}}
    model = ModelSettings(source="fake-pooler", backend="fake-pooler", options=options, **fields)
    limits = LimitsSettings(max_queue_tokens=2000)
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()), limits=limits)
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05)
    registry = PluginRegistry.load(settings.plugins, builtin=["fake-pooler"])
    manager = ModelManager(settings, registry, restart_policy=policy)
    try:
        await manager.start()
        await manager.wait_settled(60)
        yield Server(manager, Recovery(), folder)
    finally:
        await manager.close()


def alone(*texts: str) -> np.ndarray[Any, Any]:
    """The rows that the model gives without a server."""
    pooler = FakePooler()
    encode, arrange = pooler.tokenizer.encode, pooler.capabilities.text.arrange
    return pooler.pool([arrange(encode(text, False)) for text in texts])


async def test_a_worker_killed_in_a_pass_is_asked_again(tmp_path: Path) -> None:
    """kill -9: every waiting and running request gets its rows from the next worker."""
    async with serving(tmp_path) as server:
        with server.held():
            bulk = asyncio.create_task(server.pool(*(f"text {number}" for number in range(20))))
            await server.passes(1)
            short = asyncio.create_task(server.pool("short"))
            engine = await server.engine()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await engine.died
        rows, one = await bulk, await short

        assert np.array_equal(rows.array, alone(*(f"text {number}" for number in range(20))))
        assert np.array_equal(one.array, alone("short"))
        assert server.manager.find("m").status().num_restarts == 1


async def test_workers_killed_from_outside_are_not_the_fault_of_a_request(tmp_path: Path) -> None:
    """Two of them: it is asked a third time."""
    async with serving(tmp_path) as server:
        with server.held():
            asked = asyncio.create_task(server.pool("short"))
            for number in (1, 2):
                await server.passes(number)
                engine = await server.engine()
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGKILL)
                await engine.died
            await server.passes(3)
        assert np.array_equal((await asked).array, alone("short"))


async def test_a_request_whose_worker_does_not_come_back_may_be_repeated(tmp_path: Path) -> None:
    """It gets a 503, not the 422 of one that kills workers: no process starts within a millisecond."""
    async with serving(tmp_path, replay_timeout_s=0.001) as server:
        with server.held():
            asked = asyncio.create_task(server.pool("short"))
            await server.passes(1)
            engine = await server.engine()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await engine.died
        with pytest.raises(EngineDead):
            await asked


async def test_a_text_that_ends_workers_is_refused_after_one_repetition(tmp_path: Path) -> None:
    """Others that were in the same pass get their rows; the same text again is refused at once."""
    async with serving(tmp_path, {"abort_at_token": FATAL}) as server:
        engine = await server.engine()
        with server.held():
            first = asyncio.create_task(server.pool("first"))
            await server.passes(1)
            tasks = [asyncio.create_task(server.pool(text)) for text in ("innocent", "a #", "guiltless")]
            await until(lambda: engine.num_open == 4)
            await engine.tokenize((Segment("x"),), add_special=False)  # so the others are in the queue
        others = [await first, await tasks[0], await tasks[2]]
        with pytest.raises(RequestKillsWorker):
            await tasks[1]
        passes = await server.passes(1)
        with pytest.raises(RequestKillsWorker):
            await server.pool("a #")

        expected = (alone("first"), alone("innocent"), alone("guiltless"))
        assert all(np.array_equal(one.array, rows) for one, rows in zip(others, expected, strict=True))
        assert len(passes[1]) == 3
        assert await server.passes(1) == passes
        assert server.manager.find("m").status().num_restarts == 2


async def test_a_snapshot_shows_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        engine = await server.engine()
        with server.held():
            first = asyncio.create_task(server.pool("first"))
            await server.passes(1)
            second = asyncio.create_task(server.pool("second"))
            await until(lambda: engine.num_open == 2)
            await engine.tokenize((Segment("x"),), add_special=False)
            view = asyncio.create_task(engine.view())
            await until(lambda: engine.num_open == 3)
        await asyncio.gather(first, second)
        (shown,) = (await view).requests

        assert (shown.request_id, [one.phase for one in shown.sequences]) == ("p2", ["queued"])
        assert shown.usage.prompt_tokens == 7


async def test_a_pass_that_hangs_ends_its_worker_and_no_other_request(tmp_path: Path) -> None:
    async with serving(tmp_path, {"hang_at_token": FATAL}, step_timeout_s=1.0) as server:
        one, two, hung = await asyncio.gather(
            server.pool("one"), server.pool("two"), server.pool("a #"), return_exceptions=True
        )

        assert isinstance(hung, RequestKillsWorker)
        assert isinstance(one, PoolingResult) and np.array_equal(one.array, alone("one"))
        assert isinstance(two, PoolingResult) and np.array_equal(two.array, alone("two"))


async def test_a_death_that_happens_once_is_not_noticed(tmp_path: Path) -> None:
    faults = {"abort_at_step": 1, "latch": str(tmp_path / "latch")}
    async with serving(tmp_path, faults) as server:
        assert np.array_equal((await server.pool("x", "y")).array, alone("x", "y"))
        assert server.manager.find("m").status().num_restarts == 1


async def test_a_failure_of_the_model_fails_its_request_only(tmp_path: Path) -> None:
    """Exceptions and numbers that are not finite: the pass is computed again, each request alone."""
    async with serving(tmp_path, {"raise_at_token": FATAL, "nan_at_token": ord("%")}) as server:
        engine = await server.engine()
        with server.held():
            first = asyncio.create_task(server.pool("first"))
            await server.passes(1)
            tasks = [asyncio.create_task(server.pool(text)) for text in ("a #", "innocent", "b %")]
            await until(lambda: engine.num_open == 4)
            await engine.tokenize((Segment("x"),), add_special=False)
        raised, fine, infinite = await asyncio.gather(*tasks, return_exceptions=True)
        await first

        assert isinstance(raised, PluginFailed) and "'fake-pooler'" in raised.message
        assert isinstance(infinite, GenerationFailed) and "finite" in infinite.message
        assert isinstance(fine, PoolingResult) and np.array_equal(fine.array, alone("innocent"))
        assert server.manager.find("m").status().num_restarts == 0


async def test_requests_wait_no_longer_than_they_may(tmp_path: Path) -> None:
    """A full queue of tokens refuses at once; a request that has waited too long for its first pass is ended."""
    async with serving(tmp_path) as server:
        engine = await server.engine()
        with server.held():
            first = asyncio.create_task(server.pool("first"))
            await server.passes(1)
            engine.request_queue.enter("p2", "", 0)
            engine.request_queue.enter("p3", "", 0)
            late = asyncio.create_task(server.pool("z" * 400, queue_timeout_s=0.001))
            await until(lambda: engine.num_open == 2)
            await engine.tokenize((Segment("x"),), add_special=False)
            with pytest.raises(Overloaded, match="Too many prompt tokens"):
                await server.pool(*(f"{number}" + "y" * 400 for number in range(9)))
        await first
        with pytest.raises(QueueTimeout, match=r"0\.001 s"):
            await late
        assert (await server.pool("x")).num_tokens == (3,)


async def test_rows_are_kept_for_one_namespace_where_the_settings_say_so(tmp_path: Path) -> None:
    """The cache is bounded: the least recently used rows go."""
    async with serving(tmp_path, pooling_cache=ByteCount(3 * (4 * 32 + 200))) as server:
        for texts, namespace in ((("a", "b"), "x"), (("b", "a"), "x"), (("a",), "y"), (("c", "d"), "x"), (("a",), "x")):
            rows = await server.pool(*texts, namespace=namespace)
            assert np.array_equal(rows.array, alone(*texts))
        computed = [len(one) for one in await server.passes(4)]

        assert computed == [2, 1, 2, 1]


async def test_an_unloaded_model_ends_its_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        with server.held():
            running = asyncio.create_task(server.pool("first"))
            await server.passes(1)
            await server.manager.find("m").unload(0.0, force=True)
            with pytest.raises(EngineDead):
                await running
