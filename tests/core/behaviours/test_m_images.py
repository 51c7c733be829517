"""H36: images that are none, and images for a model of text. tests/plugins/remote has a model that sees."""

import base64
import struct
import zlib
from typing import Any

import pytest

from .client import Server, check_client_error


def png(width: int = 1, height: int = 1) -> bytes:
    """A whole PNG whose header claims this size; its data is that of one pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def link(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


BAD_LINKS = {
    "nonsense": "nonsense",
    "empty": "data:image/png;base64,",
    "text": link(b"this is no image"),
    "half": link(png()[: len(png()) // 2]),
    "html": "data:text/html,<h1>hi</h1>",
    "html_base64": link(b"<h1>hi</h1>", "text/html"),
    "huge": link(png(20_000, 20_000)),
    "no_comma": "data:image/png;base64",
    "no_base64": "data:image/png,%89PNG",
    "damaged_base64": "data:image/png;base64,iVBORw0KGgo=!!!!",
    "file": "file:///etc/passwd",
    "ftp": "ftp://example.org/a.png",
    "address": "http://127.0.0.1:9/a.png",
}


def image_messages(part: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": "What is this?"}, part]}]


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", BAD_LINKS.values(), ids=BAD_LINKS)
def test_h36_a_text_model_says_that_it_takes_text_only(server: Server, url: str, stream: bool) -> None:
    response = server.try_chat(messages=image_messages(image_part(url)), stream=stream, max_tokens=4)
    error = check_client_error(response, "messages[0].content[1]")

    assert "text only" in error["message"]
    server.check_alive()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": 5},
        {"type": "hologram", "hologram": {}},
        {"type": "image_url", "image_url": {"url": link(png())}},
    ],
    ids=["no_link", "no_url", "number", "unknown", "good"],
)
@pytest.mark.parametrize("role", ["user", "system"])
def test_h36_no_part_is_ignored(server: Server, part: dict[str, Any], role: str) -> None:
    messages = [*image_messages(part, role), {"role": "user", "content": "hi"}]
    check_client_error(server.try_chat(messages=messages, max_tokens=4), "messages[0].content[1]")
    server.check_alive()
