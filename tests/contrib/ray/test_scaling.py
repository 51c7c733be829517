"""Changes of a model's replicas on a Ray cluster while they serve: their number, their replacement, deployment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse_testkit.waiting import until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

Serving = Callable[..., contextlib.AbstractAsyncContextManager[Any]]

_STEP_S = 0.2
_CONFIG = """
[models.m]
source = "fake"
backend = "ray"
inner = "fake"
replicas = 2
slots = 128
cpus = 0
resources = {{ place = 1 }}
step_delay_s = {step_s}

[plugins]
allow = ["ray"]

[plugins.ray]
address = "{address}"
"""

_MINUTE = round(60 / _STEP_S)
"""Tokens of an answer that takes a minute."""


async def _command(address: str, *arguments: str) -> str:
    """Run a command of the plugin in a process of its own, as an operator does."""
    program = sys.executable, "-m", "enginehouse", *arguments, "--address", address
    process = await asyncio.create_subprocess_exec(*program, stdout=PIPE, stderr=STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output


async def test_number_of_replicas_follows_the_requests_and_a_stream_of_a_minute_moves(
    cluster: Any, lasting_nodes: list[Any], serving: Serving
) -> None:
    autoscale = {"min": 0, "max": 2, "target": 2, "down_after_s": 5}
    async with serving() as server:
        expected = await asyncio.gather(*(server.ask(number, _MINUTE) for number in range(2)))
    async with serving(cluster.address, autoscale=autoscale, step_delay_s=_STEP_S) as server:
        assert len(server.members) == 1
        await until(lambda: not server.members, timeout_s=60)  # no request: none is needed

        stories = [asyncio.create_task(server.ask(0, _MINUTE))]  # waits for a replica
        await until(lambda: len(server.members) == 1, timeout_s=100)
        (old,) = server.members
        others = [asyncio.create_task(server.ask(number, 3000)) for number in range(2, 5)]
        await until(lambda: len(server.members) == 2, timeout_s=100)
        assert old in server.members, "a replica was replaced although only their number changed"
        stories.append(asyncio.create_task(server.ask(1, _MINUTE)))
        await until(lambda: all(one.num_open for one in server.members.values()), timeout_s=60)
        for one in others:
            one.cancel()
        await until(lambda: len(server.members) == 1, timeout_s=60)
        assert not any(one.done() for one in stories)

        assert await asyncio.gather(*stories) == expected
        await until(lambda: not server.members, timeout_s=60)


async def test_replicas_outlive_servers_and_streams_of_a_minute_move_when_each_is_replaced(
    cluster: Any, lasting_nodes: list[Any], serving: Serving, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(_CONFIG.format(address=cluster.address, step_s=_STEP_S))

    command = functools.partial(_command, cluster.address)
    async with serving() as server:
        expected = await asyncio.gather(*(server.ask(number, _MINUTE) for number in range(4)))
    assert "m: 2 replicas run" in await command("deploy", "ray", "--config", str(config))
    try:
        async with serving(cluster.address, replicas=2, step_delay_s=_STEP_S) as server:
            await until(lambda: len(server.members) == 2, timeout_s=60)
            first = set(server.members)
        async with serving(cluster.address, replicas=2, step_delay_s=_STEP_S) as server:
            await until(lambda: len(server.members) == 2, timeout_s=60)
            assert set(server.members) == first, "the replicas ended with their first server"
            stories = [asyncio.create_task(server.ask(number, _MINUTE)) for number in range(4)]
            await until(lambda: all(one.num_open for one in server.members.values()), timeout_s=60)
            await command("deploy", "ray", "--config", str(config))
            assert set(server.members) == first, "the same settings replaced replicas"
            await command("deploy", "ray", "--config", str(config), "--restart")
            await until(lambda: len(server.members) == 2 and not first & set(server.members), timeout_s=100)

            assert await asyncio.gather(*stories) == expected
            assert "m: stopped" in await command("undeploy", "ray")
            await until(lambda: not server.members, timeout_s=60)
            await command("deploy", "ray", "--config", str(config), "--replicas", "1")
            await until(lambda: len(server.members) == 1, timeout_s=60)
            assert await server.ask(0, 5)
    finally:
        await command("undeploy", "ray")


async def test_first_replica_is_not_stopped_while_it_loads(
    cluster: Any, lasting_nodes: list[Any], serving: Serving, tmp_path: Path
) -> None:
    """Loading takes longer than the server waits until it stops what no request needs."""
    autoscale = {"min": 0, "max": 1, "target": 2, "down_after_s": 0}
    config = tmp_path / "c.toml"
    lines = "open_delay_s = 4\nautoscale = { min = 0, max = 1, target = 2, down_after_s = 0 }"
    text = _CONFIG.format(address=cluster.address, step_s=0.01)
    config.write_text(text.replace("replicas = 2", lines))
    await _command(cluster.address, "deploy", "ray", "--config", str(config))
    try:
        for _ in range(2):  # the second server finds no replica
            async with serving(cluster.address, autoscale=autoscale, step_delay_s=0.01, open_delay_s=4) as server:
                assert await server.ask(0, 5)
                await until(lambda server=server: not server.members, timeout_s=60)
    finally:
        await _command(cluster.address, "undeploy", "ray")
