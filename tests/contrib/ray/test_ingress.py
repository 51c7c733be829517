"""The server as an application of Ray Serve, behind its HTTP proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

_CONFIG = """
[server]
port = {port}

[models.m]
source = "fake"
backend = "ray"
inner = "fake"
replicas = 2
slots = 4
cpus = 0
resources = {{ place = 1 }}
step_delay_s = 0.02

[[auth.keys]]
name = "one"
key = "secret-of-one"
scopes = ["infer", "admin"]

[plugins]
allow = ["ray"]

[plugins.ray]
address = "{address}"
"""


@pytest.fixture
def without_serve(cluster: Any) -> Iterator[None]:
    """Ray Serve does not run: its proxies are chosen when it starts."""
    import ray
    from ray import serve

    def end() -> None:
        if not ray.is_initialized():
            ray.init(address=cluster.address, namespace="enginehouse", log_to_driver=False)
        serve.shutdown()

    end()
    yield
    end()


async def _command(address: str, *arguments: str) -> tuple[int, str]:
    program = sys.executable, "-m", "enginehouse", *arguments, "--address", address
    process = await asyncio.create_subprocess_exec(*program, stdout=PIPE, stderr=STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode is not None
    return process.returncode, output


async def _deltas(client: httpx.AsyncClient, max_tokens: int) -> list[str]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "story"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
    }
    found = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
    assert line == "data: [DONE]" or not line
    return found


async def _running(client: httpx.AsyncClient) -> list[Any]:
    found: list[Any] = (await client.get("/admin/requests")).raise_for_status().json()["data"]
    return found


async def _until_none_runs(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while await _running(client):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)


async def _models(client: httpx.AsyncClient) -> int:
    """Return the status of a request to the server; that of Ray's proxy while there is none."""
    return (await client.get("/v1/models")).status_code


async def test_server_behind_the_proxies_of_ray(
    cluster: Any, without_serve: None, lasting_nodes: list[Any], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = tmp_path / "c.toml"
    config.write_text(_CONFIG.format(port=port, address=cluster.address))
    deploy = "deploy", "ray", "--config", str(config)
    code, output = await _command(cluster.address, *deploy, "--http", "serve")
    assert code == 0, output
    assert f"127.0.0.1:{port} of each machine" in output
    key = {"Authorization": "Bearer secret-of-one"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=120) as client:
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})).status_code == 401
        pieces = await _deltas(client, 40)
        assert len(pieces) > 10, "the proxy held the stream back"

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await _deltas(client, 3000)
        await _until_none_runs(client)  # the client left

        import ray

        (name,) = [
            one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "enginehouse#" in one["name"]
        ]
        ray.kill(ray.get_actor(name, namespace="serve"))
        async with asyncio.timeout(100):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if await _models(client) == 200:
                        break
                await asyncio.sleep(0.1)
        assert "".join(await _deltas(client, 40)) == "".join(pieces)

        code, output = await _command(cluster.address, "deploy", "ray", "--config", str(config), "--http", "own")
        assert code == 0, output
        assert await _models(client) == 200, "deploying the replicas ended the server"
        code, output = await _command(cluster.address, "undeploy", "ray", "enginehouse")
        assert "stopped" not in output, "no model has that name"
        assert await _models(client) == 200
        code, output = await _command(cluster.address, "undeploy", "ray")
        assert code == 0
        assert "enginehouse: stopped" in output
        assert await _models(client) in {404, 503}


async def test_proxies_of_a_running_ray_serve_cannot_be_changed(
    cluster: Any, without_serve: None, lasting_nodes: list[Any], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(_CONFIG.format(port=8123, address=cluster.address))
    from ray import serve

    serve.start(proxy_location="Disabled")
    code, output = await _command(cluster.address, "deploy", "ray", "--config", str(config), "--http", "serve")
    assert code != 0
    assert "Ray Serve runs without HTTP proxies at 127.0.0.1:8123" in output
