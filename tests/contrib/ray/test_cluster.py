"""A model on a Ray cluster of a head and two nodes, with the fake backend: what clients see when parts of it die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from enginehouse.contract.errors import EngineDead, RequestKillsWorker
from enginehouse_testkit.waiting import until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

Serving = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


async def test_answers_are_those_of_a_local_worker_and_cancelled_requests_free_their_slots(
    cluster: Any, nodes: list[Any], told: list[str], serving: Serving
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
    cluster: Any, nodes: list[Any], told: list[str], serving: Serving
) -> None:
    async with serving(cluster.address, replicas=2, step_delay_s=0.1) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 100, timeout_s=60)
        assert all(one.num_open for one in server.members.values())
        cluster.remove_node(nodes[0], allow_graceful=False)

        assert await asyncio.gather(*asked) == told


async def test_inner_worker_that_is_killed_changes_no_text_and_is_started_again(
    cluster: Any, nodes: list[Any], told: list[str], serving: Serving
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


async def test_both_nodes_lost_is_a_retryable_error_after_the_limit(
    cluster: Any, nodes: list[Any], serving: Serving
) -> None:
    async with serving(cluster.address, {"replay_timeout_s": 2.0}, replicas=2, step_delay_s=0.1) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = asyncio.create_task(server.ask(0, 400))
        await until(lambda: server.num_tokens > 5, timeout_s=60)
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)

        with pytest.raises(EngineDead, match="try again"):
            await asked


async def test_request_that_ends_the_workers_of_two_replicas_is_refused_and_others_continue(
    cluster: Any, nodes: list[Any], told: list[str], serving: Serving
) -> None:
    faults = {"abort_at_text": "poison"}
    async with serving(cluster.address, replicas=2, step_delay_s=0.1, faults=faults) as server:
        await until(lambda: len(server.members) == 2, timeout_s=60)
        asked = [asyncio.create_task(server.ask(number)) for number in range(20)]
        await until(lambda: server.num_tokens > 20, timeout_s=60)

        with pytest.raises(RequestKillsWorker):
            await server.ask(99, text="poison")
        assert await asyncio.gather(*asked) == told
