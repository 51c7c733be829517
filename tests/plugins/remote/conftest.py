"""Servers to stand behind a remote model: ours with scripted models, and a small one that misbehaves as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from attrs import define, field

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import ServerThread, server_thread

pytestmark = pytest.mark.remote

Answer = Callable[[dict[str, Any], "Wire"], Awaitable[None]]


@define
class Wire:
    """Writes one answer."""

    writer: asyncio.StreamWriter

    def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Status", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    def body(self, data: Any, status: int = 200) -> None:
        self.head(status, content_type="application/json")
        self.writer.write(json.dumps(data).encode())

    async def chunk(self, data: Any) -> None:
        self.writer.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")
        await self.writer.drain()

    async def text(self, text: str) -> None:
        await self.chunk({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})

    async def end(self, reason: str = "stop", **usage: int) -> None:
        await self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if usage:
            await self.chunk({"choices": [], "usage": usage})
        await self.chunk(b"[DONE]")


async def says_hello(request: dict[str, Any], wire: Wire) -> None:
    wire.head(content_type="text/event-stream")
    await wire.chunk({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    await wire.text("Hello")
    await wire.text(" there")
    await wire.end(prompt_tokens=7, completion_tokens=2, total_tokens=9)


@define
class SmallServer:
    """An OpenAI-compatible server of one model; ``answer`` is told what to do with each generating request.

    With ``info`` it is a server of Text Embeddings Inference instead, which describes its model there.
    """

    answer: Answer = says_hello
    owned_by: str = "somebody"
    info: Any = None
    paths: list[str] = field(factory=list)
    requests: list[dict[str, Any]] = field(factory=list)
    headers: list[dict[str, str]] = field(factory=list)
    num_left: int = 0
    num_asked: int = 0
    url: str = ""
    _port: int = 0
    _server: asyncio.Server | None = None

    async def start(self) -> SmallServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/v1"
        return self

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        wire = Wire(writer)
        if self.info is not None and head.startswith("GET"):
            is_info = head.startswith("GET /info ")
            wire.body(self.info if is_info else {"error": "not found"}, 200 if is_info else 404)
        elif head.startswith("GET /v1/models"):
            self.num_asked += 1
            wire.body({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": self.owned_by}]})
        else:
            self.headers.append(headers)
            self.paths.append(head.split()[1])
            self.requests.append(json.loads(body))
            await self._answer(reader, wire)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, wire: Wire) -> None:
        answering = asyncio.ensure_future(self.answer(self.requests[-1], wire))
        leaving = asyncio.ensure_future(reader.read())
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.num_left += 1
            answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


@pytest.fixture
async def small_server() -> Any:
    """Call it to start a server."""
    servers: list[SmallServer] = []

    async def start(answer: Answer = says_hello, owned_by: str = "somebody", info: Any = None) -> SmallServer:
        servers.append(await SmallServer(answer, owned_by, info).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Our own server with models that say known texts, and the fake one that computes."""
    folder = tmp_path_factory.mktemp("upstream")

    def scripted(name: str, tokens: list[Any], slots: int = 8, **options: Any) -> ModelSettings:
        source = write_script(folder / f"{name}.json", tokens, **options)
        return ModelSettings(source=source, backend="scripted", slots=slots, context=5000, aliases=(f"{name}-alias",))

    models = {
        "plain": scripted("plain", [f" word{n}" for n in range(150)]),
        "short": scripted("short", ["Hello", " there", "."]),
        "bytes": scripted("bytes", [{"bytes": [byte]} for byte in "Grüße 漢字 🧑🏽‍🚀".encode()]),
        "endless": scripted("endless", [" tick", {"delay_s": 0.005}], slots=1, loop=True),
        "call": scripted("call", ['<tool_call>\n{"name": "lamp", "arguments": {"level": ', "7", "}}\n</tool_call>"]),
        "fake": ModelSettings(source=str(folder), backend="fake", isolation="thread", context=2048),
    }
    settings = Settings(models=models, plugins=PluginsSettings(allow=("llguidance", "parsers", "samplers")))
    with server_thread(settings) as running:
        wait_ready(running.url)
        yield running


@pytest.fixture(scope="session")
def served(upstream: ServerThread) -> Iterator[str]:
    """A server whose models are those of ``upstream``, through the remote backend; its URL."""
    models = {
        name: ModelSettings(source=upstream.url, backend="remote", options={"model": name})
        for name in upstream.settings.models
    }
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=("remote", "samplers")))) as running:
        wait_ready(running.url)
        yield running.url
