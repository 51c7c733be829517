"""H36 for a model that sees: the remote backend in front of a server that takes images."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from attrs import define, field

from enginehouse.settings.config import MediaSettings, ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import RouterSettings
from enginehouse_testkit.served import served

pytestmark = pytest.mark.remote


def png(width: int = 1, height: int = 1) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def link(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@define
class Upstream:
    """A server of a model that takes images, and of files; it notes what it is asked."""

    url: str = ""
    chats: list[dict[str, Any]] = field(factory=list)
    gets: list[str] = field(factory=list)

    def run(self) -> ThreadingHTTPServer:
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, data: bytes, kind: str, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for name, value in {"content_type": kind, "content_length": str(len(data)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(b'{"object":"list","data":[{"id":"eye","owned_by":"somebody"}]}', "application/json")
                    return
                upstream.gets.append(self.path)
                match self.path:
                    case "/image.png":
                        self.answer(png(), "image/png")
                    case "/text":
                        self.answer(b"hello", "text/plain")
                    case "/moved":
                        self.answer(b"", "text/plain", 302, location="/image.png")
                    case "/elsewhere":
                        self.answer(b"", "text/plain", 302, location="http://other.example/image.png")
                    case "/round":
                        self.answer(b"", "text/plain", 302, location="/round")
                    case "/packed":
                        self.answer(png(), "image/png", content_encoding="gzip")
                    case "/large":
                        self.answer(b"\0" * 300_000, "image/png")
                    case "/slow":
                        self.send_response(200)
                        self.end_headers()
                        for _ in range(100):
                            self.wfile.write(b"\0")
                            time.sleep(0.1)
                    case _:
                        self.answer(b"", "text/plain", 404)

            def do_POST(self) -> None:
                upstream.chats.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                delta = {"choices": [{"index": 0, "delta": {"content": "a cat"}, "finish_reason": None}]}
                end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in (delta, end)]
                self.answer("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever).start()
        return server


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    server = upstream.run()
    yield upstream
    server.shutdown()
    server.server_close()


def serve(upstream: Upstream, **media: Any) -> Iterator[httpx.Client]:
    def model(**options: Any) -> ModelSettings:
        return ModelSettings(source=upstream.url, backend="remote", options=options)

    settings = Settings(
        models={"eye": model(images=True), "blind": model()},
        media=MediaSettings(**media),
        plugins=PluginsSettings(allow=("remote", "router")),
        router=RouterSettings(models=("blind", "eye")),
    )
    with served(settings, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def closed(upstream: Upstream) -> Iterator[httpx.Client]:
    """As it comes: nothing is fetched."""
    yield from serve(upstream)


@pytest.fixture(scope="module")
def opened(upstream: Upstream) -> Iterator[httpx.Client]:
    """Reads from the upstream, which is on this machine."""
    host = upstream.url.removeprefix("http://")
    yield from serve(
        upstream, allowed_hosts=(host, "public.example"), allow_private=True, max_bytes=100_000, timeout_s=1.5
    )


def post(client: httpx.Client, part: Any, role: str = "user", **fields: Any) -> httpx.Response:
    content = [{"type": "text", "text": "What is this?"}, part, {"type": "text", "text": "Say it."}]
    messages = [{"role": role, "content": content}, {"role": "user", "content": "Well?"}]
    return client.post("/v1/chat/completions", json={"model": "eye", "messages": messages, **fields})


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_the_router_asks_only_models_that_take_images(closed: httpx.Client) -> None:
    """And says so; a text goes to either."""

    def ask(content: Any) -> dict[str, Any]:
        body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
        return closed.post("/v1/route", json=body).json()

    seeing = ask([{"type": "text", "text": "What is this?"}, image(link(png()))])
    refused = {one["model"]: one["refused"] for one in seeing["candidates"]}
    assert seeing["attempts"] == ["eye"]
    assert refused["eye"] is None and "text only" in refused["blind"]
    assert sorted(ask("Hello")["attempts"]) == ["blind", "eye"]


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith("messages[0].content[1]"), error
    return error


def check_alive(client: httpx.Client) -> None:
    body = {"model": "eye", "messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "not an http, https or data URL"),
        ("", "not an http, https or data URL"),
        ("data:image/png;base64,", "empty"),
        (link(b"this is no image"), "not a PNG"),
        (link(png()[:40]), "too early"),
        (link(png()[:-1]), "too early"),
        ("data:text/html,<h1>hi</h1>", "say that it is an image"),
        (link(png(20_000, 20_000)), "max_pixels"),
        (link(png(0, 5)), "no pixels"),
        ("data:image/png;base64", "comma"),
        ("data:image/png,%89PNG", "base64"),
        ("data:image/png;base64,iVBORw0KGgo=!!", "damaged"),
        ("file:///etc/passwd", "not an http"),
        ("http://127.0.0.1/a.png", "media.allowed_hosts"),
        ("https://example.org/a.png", "media.allowed_hosts"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h36_bad_images_are_refused_in_time(
    closed: httpx.Client, upstream: Upstream, url: str, reason: str, stream: bool
) -> None:
    before, began = len(upstream.chats), time.monotonic()
    error = refused(post(closed, image(url), stream=stream))

    assert error["param"] == "messages[0].content[1].image_url.url" and reason in error["message"]
    assert time.monotonic() - began < 60
    assert len(upstream.chats) == before and upstream.gets == []
    check_alive(closed)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": [link(png())]},
        image(link(png()), detail="closest"),
        {"type": "hologram", "hologram": link(png())},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": 5},
    ],
)
def test_h36_bad_parts_are_refused(closed: httpx.Client, part: dict[str, Any]) -> None:
    refused(post(closed, part))
    check_alive(closed)


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool"])
def test_h36_images_stand_in_messages_of_the_user(closed: httpx.Client, role: str) -> None:
    assert "user" in refused(post(closed, image(link(png())), role))["message"]


def test_h36_images_reach_the_server_as_what_they_are(closed: httpx.Client, upstream: Upstream) -> None:
    """A PNG that says it is a JPEG is passed on as a PNG, at its place between the texts."""
    response = post(closed, image(link(png(), "image/jpeg"), detail="low"))

    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "a cat"
    assert upstream.chats[-1]["messages"][0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": link(png()), "detail": "low"}},
        {"type": "text", "text": "Say it."},
    ]
    assert upstream.chats[-1]["messages"][1]["content"] == "Well?"


def test_h36_a_model_that_does_not_see_says_so(closed: httpx.Client) -> None:
    error = refused(post(closed, image(link(png())), model="blind"))

    assert error["code"] == "unsupported_parameter" and "text only" in error["message"]


def test_too_many_images_are_refused(upstream: Upstream) -> None:
    for client in serve(upstream, max_images=2):
        content = [image(link(png()))] * 3
        body = {"model": "eye", "messages": [{"role": "user", "content": content}]}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "media.max_images" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/image.png", "/moved"])
def test_images_are_read_from_hosts_that_are_allowed(opened: httpx.Client, upstream: Upstream, path: str) -> None:
    assert post(opened, image(upstream.url + path)).status_code == 200
    assert upstream.chats[-1]["messages"][0]["content"][1] == image(link(png()))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/text", "not a PNG"),
        ("/nothing", "status 404"),
        ("/elsewhere", "media.allowed_hosts"),
        ("/round", "media.max_redirects"),
        ("/packed", "compressed"),
        ("/large", "media.max_bytes"),
        ("/slow", "media.timeout_s"),
    ],
)
def test_what_cannot_be_used_is_refused(opened: httpx.Client, upstream: Upstream, path: str, reason: str) -> None:
    began = time.monotonic()

    assert reason in refused(post(opened, image(upstream.url + path)))["message"]
    assert time.monotonic() - began < 60
    check_alive(opened)


def test_large_data_urls_are_refused(opened: httpx.Client) -> None:
    assert "media.max_bytes" in refused(post(opened, image(link(b"\0" * 200_000))))["message"]


def test_private_addresses_need_leave(upstream: Upstream) -> None:
    """A listed host is not enough: its name could lead into the network of the server."""
    before = len(upstream.gets)
    for client in serve(upstream, allowed_hosts=(upstream.url.removeprefix("http://"), "localhost:80")):
        for url in (f"{upstream.url}/image.png", "http://localhost/a.png"):
            assert "public internet" in refused(post(client, image(url)))["message"]
    assert len(upstream.gets) == before


async def test_other_requests_go_on_while_an_image_is_read(opened: httpx.Client, upstream: Upstream) -> None:
    async with httpx.AsyncClient(base_url=opened.base_url, timeout=30) as client:
        content = [image(upstream.url + "/slow")]
        body = {"model": "eye", "messages": [{"role": "user", "content": content}]}
        reading = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0.3)
        assert (await client.get("/health")).status_code == 200
        assert not reading.done()
        assert (await reading).status_code == 400
