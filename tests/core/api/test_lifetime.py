"""Clients that leave, streams that wait, models that load, and the end of the server."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import evolve

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.scripted import ScriptedBackend, ScriptedEngine
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.server_thread import ServerThread, server_thread
from enginehouse_testkit.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class WatchedBackend(ScriptedBackend):
    """The scripted backend, with its engines within a test's reach."""

    def __init__(self) -> None:
        self.engines: list[ScriptedEngine] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.refusal: Exception | None = None

    def open(self, source, options, progress):
        assert self.may_open.wait(60)
        if self.refusal:
            raise self.refusal
        engine = super().open(source, options, progress)
        self.engines.append(engine)
        return engine

    def num_busy(self) -> int:
        return sum(engine.slots.num_running + len(engine.slots.waiting) for engine in self.engines)

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.num_busy():
            assert time.monotonic() < deadline, "a request still holds its slot"
            time.sleep(0.01)


@pytest.fixture
def backend() -> WatchedBackend:
    return WatchedBackend()


@pytest.fixture
def make_server(tmp_path: Path, backend: WatchedBackend):
    """Call it with a script; it gives the settings and the registry of a server with one slot."""

    def make(
        tokens: list, *, slots: int = 1, ready: bool = True, ping_s: float = 10.0, shutdown_s: float = 2.0, **options
    ):
        source = write_script(tmp_path / "script.json", tokens, **options)
        model = ModelSettings(source=source, backend="scripted", slots=slots, options={"max_queue": 2})
        settings = Settings(
            server=ServerSettings(ping_s=ping_s, shutdown_s=shutdown_s),
            limits=LimitsSettings(),
            models={"m": model},
            plugins=PluginsSettings(allow=()),
        )
        registry = evolve(PluginRegistry.for_settings(settings), backends={"scripted": backend})
        return _serving(settings, registry, ready)

    return make


def _serving(settings: Settings, registry: PluginRegistry, ready: bool):
    return _Serving(settings, registry, ready)


class _Serving:
    def __init__(self, settings: Settings, registry: PluginRegistry, ready: bool) -> None:
        self.manager = server_thread(settings, registry)
        self.ready = ready

    def __enter__(self) -> tuple[ServerThread, httpx.Client]:
        running = self.manager.__enter__()
        self.client = httpx.Client(base_url=running.url, timeout=60)
        while self.ready and self.client.get("/health").status_code != 200:
            time.sleep(0.01)
        return running, self.client

    def __exit__(self, *error) -> None:
        self.client.close()
        self.manager.__exit__(*error)


ENDLESS = [" tick", {"delay_s": 0.01}]


def open_request(client: httpx.Client, body: dict) -> socket.socket:
    """Send a request and return its connection at once."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


def wait_busy(backend: WatchedBackend, num: int) -> None:
    deadline = time.monotonic() + 60
    while backend.num_busy() != num:
        assert time.monotonic() < deadline, f"{backend.num_busy()} busy instead of {num}"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_h33_leaving_frees_the_slot(make_server, backend: WatchedBackend, stream: bool) -> None:
    with make_server(ENDLESS, loop=True) as (_, client):
        for _ in range(5):
            connection = open_request(client, CHAT | {"stream": stream})
            wait_busy(backend, 1)
            connection.close()
            backend.wait_idle()
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_h33_leaving_the_queue(make_server, backend: WatchedBackend, stream: bool) -> None:
    with make_server(ENDLESS, loop=True) as (_, client):
        first = open_request(client, CHAT | {"stream": True})
        wait_busy(backend, 1)
        queued = open_request(client, CHAT | {"stream": stream})
        wait_busy(backend, 2)
        queued.close()
        wait_busy(backend, 1)
        first.close()
        backend.wait_idle()


def test_leaving_with_several_prompts_frees_all_slots(make_server, backend: WatchedBackend) -> None:
    with make_server(ENDLESS, loop=True, slots=3) as (_, client):
        body = {"prompt": ["a", "b", "c"], "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.iter_raw()  # it closes the connection when it is dropped
            next(chunks)
            wait_busy(backend, 3)
        backend.wait_idle()


def test_aborts_leave_no_error_trace(
    make_server, backend: WatchedBackend, caplog: pytest.LogCaptureFixture, access_lines
) -> None:
    with make_server(ENDLESS, loop=True) as (_, client), caplog.at_level("INFO"):
        connection = open_request(client, CHAT | {"stream": True})
        wait_busy(backend, 1)
        connection.recv(1000)
        connection.close()
        backend.wait_idle()
        lines = access_lines(1)

    assert "outcome=cancelled" in lines[0]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_full_queue_is_told_when_to_come_back(make_server, backend: WatchedBackend) -> None:
    with make_server(ENDLESS, loop=True) as (_, client):
        connections = [open_request(client, CHAT | {"stream": True}) for _ in range(3)]
        wait_busy(backend, 3)
        for stream in (True, False):
            response = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"
        # Of several prompts none stays behind when one finds no room.
        assert client.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 429
        wait_busy(backend, 3)
        for connection in connections:
            connection.close()
        backend.wait_idle()


def test_a_waiting_stream_gets_pings(make_server, backend: WatchedBackend) -> None:
    """In the queue and between tokens; the events around them stay whole."""
    with make_server([{"delay_s": 0.4}, "a", {"delay_s": 0.4}, "b"], ping_s=0.1) as (_, client):
        first = open_request(client, CHAT | {"stream": True})
        wait_busy(backend, 1)
        body = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text
        first.close()

    blocks = body.split("\n\n")
    assert blocks.count(": ping") >= 5
    assert '"role":"assistant"' in blocks[0]
    assert body.endswith("data: [DONE]\n\n")
    texts = [json.loads(block[6:]) for block in blocks if block.startswith("data: {")]
    assert "".join(text["choices"][0]["delta"].get("content", "") for text in texts) == "ab"


def test_health_while_loading(make_server, backend: WatchedBackend) -> None:
    backend.may_open.clear()
    with make_server(["a"], ready=False) as (_, client):
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert client.get("/v1/models").json()["data"][0]["state"] == "loading"
        response = client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "model_not_ready"
        backend.may_open.set()
        wait_ready(client)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_server_without_a_model_that_loads_ends(make_server, backend: WatchedBackend) -> None:
    backend.refusal = ValueError("no such thing")
    with make_server(["a"], ready=False) as (running, _):
        deadline = time.monotonic() + 60
        while running.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)

        assert running.exit_code == 1


def test_shutdown_lets_short_requests_finish(make_server, backend: WatchedBackend) -> None:
    with make_server(["a", {"delay_s": 0.5}, "b"], shutdown_s=60.0) as (running, client):
        connection = open_request(client, CHAT)
        wait_busy(backend, 1)
        running.begin_stop()
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        connection.close()

    assert b'"content":"ab"' in answer
    assert running.exit_code == 0


@pytest.mark.parametrize("stream", [True, False])
def test_shutdown_ends_long_requests_with_an_error(make_server, backend: WatchedBackend, stream: bool) -> None:
    with make_server(ENDLESS, loop=True) as (running, client):
        connection = open_request(client, CHAT | {"stream": stream})
        wait_busy(backend, 1)
        began = time.monotonic()
        running.begin_stop()
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        connection.close()

    assert time.monotonic() - began < 30
    assert b"server_stopping" in answer
    assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert running.exit_code == 0


def test_shutdown_with_a_client_that_does_not_read(make_server, backend: WatchedBackend) -> None:
    with make_server(["x" * 10_000], loop=True) as (running, client):
        connection = open_request(client, CHAT | {"stream": True, "max_tokens": 100_000})
        wait_busy(backend, 1)
        time.sleep(0.3)  # the buffers are full now
        began = time.monotonic()
        running.stop()
        connection.close()

    assert time.monotonic() - began < 30


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    source = write_script(tmp_path / "script.json", ENDLESS, loop=True)
    config = tmp_path / "enginehouse.toml"
    config.write_text(f'[models.m]\nbackend = "scripted"\nsource = "{source}"\n', encoding="utf-8")
    with started_server("--config", config) as process:
        yield process


def test_sigterm_during_four_streams_exits_with_0(process: ServerProcess) -> None:
    async def main() -> list[bytes]:
        async with httpx.AsyncClient(base_url=process.url, timeout=30) as client:

            async def read(is_begun: asyncio.Event) -> bytes:
                body = b""
                async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
                    async for data in response.aiter_bytes():
                        body += data
                        if b"tick" in body:
                            is_begun.set()
                return body

            begun = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(read(event)) for event in begun]
            await asyncio.gather(*(event.wait() for event in begun))
            process.process.terminate()
            return await asyncio.gather(*streams)

    bodies = asyncio.run(main())
    exit_code = process.process.wait(timeout=60)

    assert exit_code == 0
    assert all(b"server_stopping" in body and b"tick" in body for body in bodies)


def worker_pids() -> list[int]:
    """Processes that this one started to run models."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"enginehouse.workers" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")
@pytest.mark.parametrize("stream", [True, False])
def test_a_killed_worker_without_replay_ends_its_requests_and_the_next_one_is_served(
    tmp_path: Path, stream: bool
) -> None:
    options = {"step_delay_s": 0.02}
    model = ModelSettings(source=str(tmp_path), backend="fake", isolation="process", replay=False, options=options)
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()))
    with _serving(settings, PluginRegistry.for_settings(settings), True) as (_, client):
        connection = open_request(client, CHAT | {"stream": stream, "ignore_eos": True, "max_tokens": 4000})
        wait_until(lambda: 'running_sequences{model="m"} 1.0' in client.get("/metrics").text, "the request runs")
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        answer = b""
        while b"engine_dead" not in answer:
            answer += (chunk := connection.recv(65536))
            assert chunk, answer[-1000:]
        connection.close()

        assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200
        assert client.get("/v1/models").json()["data"][0]["num_restarts"] == 1
