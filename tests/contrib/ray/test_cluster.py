"""A model on a Ray cluster of a head and two nodes, with the fake backend: what clients see when parts of it die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest

from enginehouse.contract.errors import EngineDead, RequestKillsWorker
from enginehouse.contract.types import EngineRequest, RequestFinished, SamplingParams, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import ModelManager
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.waiting import until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

_STORE_BYTES = 80 * 2**20

_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_worker_register_timeout_seconds": "200",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_SERVE_DEPLOYMENT_HANDLE_CONTROLLER_TIMEOUT_S": "60",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
"""Settings of Ray for a machine that is busy: it reads them when it is imported."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ.update(_PATIENCE)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two nodes, each with room for one replica."""
    added = [_add(cluster), _add(cluster)]
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


def _add(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, resources={"place": 1}, object_store_memory=_STORE_BYTES)


class Server:
    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager
        self._recovery = Recovery()
        self.num_tokens = 0

    @property
    def members(self) -> dict[str, Any]:
        return self.manager.get("m").engine.members  # type: ignore[attr-defined]

    async def ask(self, number: int, max_tokens: int = 40, text: str = "story") -> str:
        request = EngineRequest(
            request_id=f"r{number}",
            segments=(Segment(f"{text} {number}"),),
            sampling=SamplingParams(temperature=1.0, seed=number),
            stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
        )
        generation = await self._recovery.start(await self.manager.wait("m"), request)
        answer, is_whole = "", False
        async for batch in generation:
            for event in batch:
                if isinstance(event, TextDelta):
                    answer += event.text
                    self.num_tokens += len(event.token_ids)
                elif isinstance(event, RequestFinished):
                    is_whole = event.usage.completion_tokens == max_tokens
        assert is_whole
        return answer


@contextlib.asynccontextmanager
async def serving(
    address: str | None = None, model: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    placed = {"inner": "fake", "cpus": 0, "resources": {"place": 1}} if address else {}
    backend = "ray" if address else "fake"
    chosen = ModelSettings(source="fake", backend=backend, slots=128, options={**placed, **options}, **(model or {}))
    plugins = PluginsSettings(allow=("ray",), options={"ray": {"address": address}} if address else {})
    settings = Settings(models={"m": chosen}, plugins=plugins)
    manager = ModelManager(settings, PluginRegistry.for_settings(settings))
    try:
        await manager.start()
        await manager.wait_settled(120)
        yield Server(manager)
    finally:
        await manager.close()


@pytest.fixture(scope="module")
def told() -> list[str]:
    """The answers of a worker on this machine."""

    async def ask_all() -> list[str]:
        async with serving() as server:
            return await asyncio.gather(*(server.ask(number) for number in range(20)))

    return asyncio.run(ask_all())


async def test_answers_are_those_of_a_local_worker_and_cancelled_requests_free_their_slots(
    cluster: Any, nodes: list[Any], told: list[str]
) -> None:
    async with serving(cluster.address, replicas=2, step_delay_s=0.01) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)

        assert await asyncio.gather(*(server.ask(number) for number in range(20))) == told

        asked = [asyncio.create_task(server.ask(number, 3000)) for number in range(100)]
        await until(lambda: server.num_tokens > 2000, timeout_s=60)
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
        await until(lambda: not any(one.num_open for one in server.members.values()))
        assert not [view for one in server.members.values() for view in (await one.view()).requests]


async def test_node_that_is_lost_in_the_middle_of_streams_changes_no_text(
    cluster: Any, nodes: list[Any], told: list[str]
) -> None:
    async with serving(cluster.address, replicas=2, step_delay_s=0.1) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 100, timeout_s=60)
        assert all(one.num_open for one in server.members.values())
        cluster.remove_node(nodes[0], allow_graceful=False)

        assert await asyncio.gather(*asked) == told


async def test_inner_worker_that_is_killed_changes_no_text_and_is_started_again(
    cluster: Any, nodes: list[Any], told: list[str]
) -> None:
    async with serving(cluster.address, replicas=2, step_delay_s=0.05) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 100, timeout_s=60)
        workers = [one for one in psutil.process_iter(["cmdline"]) if _is_worker_of(one, cluster)]
        os.kill(workers[0].pid, signal.SIGKILL)

        assert await asyncio.gather(*asked) == told
        await until(lambda: len(server.members) == 2, timeout_s=60)


def _is_worker_of(process: psutil.Process, cluster: Any) -> bool:
    if "enginehouse.workers" not in (process.info["cmdline"] or ()):
        return False
    return any(
        "EngineReplica" in " ".join(above.cmdline()) or "ServeReplica" in above.name() for above in process.parents()
    )


async def test_both_nodes_lost_is_a_retryable_error_after_the_limit(cluster: Any, nodes: list[Any]) -> None:
    async with serving(cluster.address, {"replay_timeout_s": 2.0}, replicas=2, step_delay_s=0.1) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = asyncio.create_task(server.ask(0, 400))
        await until(lambda: server.num_tokens > 5, timeout_s=60)
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)

        with pytest.raises(EngineDead, match="try again"):
            await asked


async def test_scaling_hands_streams_over_and_goes_to_zero_and_back(
    cluster: Any, nodes: list[Any], told: list[str]
) -> None:
    bounds = {"min": 0, "max": 2, "target": 8, "down_after_s": 1}
    async with serving(cluster.address, autoscale=bounds, step_delay_s=0.2) as server:
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: len(server.members) == 2, timeout_s=60)
        for one in asked[7:]:  # so few are left that one replica is enough
            one.cancel()
        await until(lambda: len(server.members) == 1, timeout_s=60)

        assert await asyncio.gather(*asked[:7]) == told[:7]
        await until(lambda: not server.members, timeout_s=60)
        assert await server.ask(3) == told[3]


async def test_request_that_ends_the_workers_of_two_replicas_is_refused_and_others_continue(
    cluster: Any, nodes: list[Any], told: list[str]
) -> None:
    faults = {"abort_at_text": "poison"}
    async with serving(cluster.address, replicas=2, step_delay_s=0.1, faults=faults) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 20, timeout_s=60)

        with pytest.raises(RequestKillsWorker):
            await server.ask(99, text="poison")
        assert await asyncio.gather(*asked) == told
