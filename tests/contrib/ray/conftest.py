"""A Ray cluster on this machine: a head, and two nodes with room for one replica each."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from enginehouse.contract.types import EngineRequest, RequestFinished, SamplingParams, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import ModelManager
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings

_STORE_BYTES = 80 * 2**20
_STARTS = 6

# Settings of Ray for a machine that is busy. Ray reads them when it is imported, which the test modules do.
os.environ.update(
    {
        "RAY_agent_register_timeout_ms": "200000",
        "RAY_worker_register_timeout_seconds": "200",
        "RAY_health_check_initial_delay_ms": "60000",
        "RAY_health_check_timeout_ms": "60000",
        "RAY_SERVE_DEPLOYMENT_HANDLE_CONTROLLER_TIMEOUT_S": "60",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster that has only a head, without room for replicas."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster()
    _add(cluster, **head)
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
    added = [_add_place(cluster), _add_place(cluster)]
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def add_node(cluster: Any, nodes: list[Any]) -> Callable[[], None]:
    """Function that adds a further one of ``nodes``; blocks, main thread only."""
    return lambda: nodes.append(_add_place(cluster))


@pytest.fixture(scope="module")
def lasting_nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two nodes for all tests of a module, each with room for one replica."""
    added = [_add_place(cluster), _add_place(cluster)]
    yield added
    for node in added:
        cluster.remove_node(node, allow_graceful=False)


def _add_place(cluster: Any) -> Any:
    return _add(cluster, num_cpus=1, resources={"place": 1})


def _add(cluster: Any, **options: Any) -> Any:
    """Add a node; again if Ray gives up, because a helper process of the node did not answer within 15 s."""
    for attempt in range(_STARTS):
        try:
            return cluster.add_node(object_store_memory=_STORE_BYTES, **options)
        except Exception:
            if attempt == _STARTS - 1:
                raise
    return None


class Server:
    """A server without HTTP that serves one model, ``m``.

    Attributes:
        num_tokens: number of tokens that have arrived in all answers.
    """

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager
        self._recovery = Recovery()
        self.num_tokens = 0

    @property
    def members(self) -> dict[str, Any]:
        """The workers of the model, by place."""
        return self.manager.get("m").engine.members  # type: ignore[attr-defined]

    async def ask(self, number: int, max_tokens: int = 40, text: str = "story") -> str:
        """Return the answer to a request, whose length is checked."""
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
async def _serving(
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


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractAsyncContextManager[Any]]:
    """Context manager of a server with the model ``m`` of the fake backend: on the cluster of an address, or here."""
    return _serving


@pytest.fixture(scope="session")
def told() -> list[str]:
    """The answers of a worker on this machine."""

    async def ask_all() -> list[str]:
        async with _serving() as server:
            return await asyncio.gather(*(server.ask(number) for number in range(20)))

    return asyncio.run(ask_all())
