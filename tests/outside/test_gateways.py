"""Two scripted servers and sglang-router as their gateway, three processes on loopback.

The options of the router are those of ``docs/scale-out.md``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from attrs import frozen

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

pytest.importorskip("sglang_router", reason="needs sglang-router: tox -e gateways")

OPTIONS = (
    "--policy=cache_aware",
    "--cb-failure-threshold=3",
    "--health-check-interval-secs=1",
    "--health-check-timeout-secs=1",
    "--health-failure-threshold=1",
)

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Count."}]}


@frozen
class Gateway:
    """A router before two servers."""

    client: httpx.Client
    servers: tuple[ServerProcess, ServerProcess]

    def workers(self) -> dict[str, bool]:
        """Whether the router uses a server, by its URL."""
        return {worker["url"]: worker["is_healthy"] for worker in self.client.get("/workers").json()["workers"]}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def router(urls: list[str], log: Path) -> Iterator[httpx.Client]:
    """The router as its own command starts it; ready when the block begins."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router", "launch", "--host=127.0.0.1", "--port", port, *OPTIONS]
    command += ["--prometheus-host=127.0.0.1", "--prometheus-port", free_port(), "--worker-urls", *urls]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return client.get("/readiness").json().get("healthy_workers") == 2
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready, log.read_text)
            yield client
        finally:
            process.kill()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    source = write_script(tmp_path / "answer.json", ["one ", {"delay_s": 0.2}, "two ", "three"])
    config = tmp_path / "config.toml"
    config.write_text(f"[models.chat]\nbackend = 'scripted'\nsource = '{source}'\n")
    with (
        started_server("--config", config) as one,
        started_server("--config", config) as two,
        router([str(one.url), str(two.url)], tmp_path / "router.log") as client,
    ):
        yield Gateway(client, (one, two))


def num_requests(server: ServerProcess) -> int:
    """Chat requests that a server has answered, by its access log."""
    return server.output.count("path=/v1/chat/completions status=200")


def test_chat_and_streams_pass_and_a_killed_server_is_left(gateway: Gateway) -> None:
    answer = gateway.client.post("/v1/chat/completions", json=CHAT)

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "one two three"

    with gateway.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]

    assert lines[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one two three"

    # The router sends a prompt to the server that had it before; that one is killed, and the same prompt is sent again.
    used = wait_until(
        lambda: max(gateway.servers, key=num_requests) if any(map(num_requests, gateway.servers)) else None
    )
    other = next(server for server in gateway.servers if server is not used)
    used.process.kill()
    used.process.wait()
    for _ in range(4):
        answer = gateway.client.post("/v1/chat/completions", json=CHAT)

        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "one two three"

    wait_until(lambda: gateway.workers() == {used.url: False, other.url: True}, gateway.workers)
