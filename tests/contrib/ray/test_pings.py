"""The server with its own port: streams are kept open while no machine is left that could continue them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse_testkit.server import started_server
from enginehouse_testkit.waiting import until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

_CONFIG = """
[server]
ping_s = 0.2

[models.m]
source = "fake"
backend = "ray"
inner = "fake"
replicas = 1
slots = 32
cpus = 0
resources = {{ place = 1 }}
step_delay_s = 0.05
replay_timeout_s = 250

[plugins]
allow = ["ray"]

[plugins.ray]
address = "{address}"
"""


class _Stream:
    """One streamed answer: its text, and the comments that came after its first token."""

    def __init__(self) -> None:
        self.text = ""
        self.num_pings = 0

    async def read(self, client: httpx.AsyncClient, number: int) -> _Stream:
        body = {"model": "m", "prompt": f"story {number}", "max_tokens": 60, "ignore_eos": True, "seed": number}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                elif line.startswith(":") and self.text:
                    self.num_pings += 1
        assert line == "data: [DONE]" or not line, line
        return self


async def test_streams_are_pinged_until_another_machine_continues_them(
    cluster: Any, nodes: list[Any], add_node: Callable[[], None], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(_CONFIG.format(address=cluster.address))
    with started_server("--config", config, ready_timeout_s=200) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=250) as client:
            expected = await asyncio.gather(*(_Stream().read(client, number) for number in range(20)))
            streams = [_Stream() for _ in range(20)]
            reading = [asyncio.create_task(stream.read(client, number)) for number, stream in enumerate(streams)]
            await until(lambda: all(stream.text for stream in streams), timeout_s=60)
            for node in list(nodes):
                cluster.remove_node(node, allow_graceful=False)
            await until(lambda: all(stream.num_pings > 2 for stream in streams), timeout_s=60)
            add_node()  # Ray does so in the main thread only; the streams wait
            await asyncio.gather(*reading)
    assert [stream.text for stream in streams] == [stream.text for stream in expected]
