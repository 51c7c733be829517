"""Reading images: the address that was checked is the one that is connected to."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from attrs import define, field

from enginehouse.pipeline.media.fetching import AddressRefused, FetchFailed, ImageFetcher
from enginehouse.settings.config import MediaSettings


@define
class Files:
    """A server that answers every connection with the same bytes."""

    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nDATA"
    heads: list[bytes] = field(factory=list)
    port: int = 0


@pytest.fixture
async def files() -> AsyncIterator[Files]:
    found = Files()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(found.answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()


def fetcher(files: Files, *addresses: Sequence[str], **settings) -> tuple[ImageFetcher, list[str]]:
    """A fetcher whose names resolve to ``addresses``, one after the other; and the names it asked for."""
    asked: list[str] = []
    remaining = list(addresses)

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return remaining.pop(0)

    allowed = (f"a.example:{files.port}", f"b.example:{files.port}")
    return ImageFetcher(MediaSettings(allowed_hosts=allowed, **settings), resolve), asked


async def test_a_name_is_resolved_once_and_its_address_connected_to(files: Files) -> None:
    """A second answer of the name server, which might lead inside, is never asked for."""
    fetch, asked = fetcher(files, ["127.0.0.1"], allow_private=True)

    assert await fetch.fetch(f"http://a.example:{files.port}/x.png?a=b") == b"DATA"
    assert asked == ["a.example"]
    head = files.heads[0].lower()
    assert head.startswith(b"get /x.png?a=b http/1.1\r\n") and f"host: a.example:{files.port}".encode() in head
    assert b"accept-encoding: identity" in head and b"cookie" not in head and b"authorization" not in head


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"])
async def test_a_name_that_leads_inside_is_refused(files: Files, address: str) -> None:
    for addresses in ([address], ["1.1.1.1", address]):
        fetch, _ = fetcher(files, addresses)
        with pytest.raises(AddressRefused, match="public internet"):
            await fetch.fetch(f"http://a.example:{files.port}/x.png")
    assert files.heads == []


async def test_a_redirect_is_checked_like_the_first_address(files: Files) -> None:
    files.answer = b"HTTP/1.1 302 Found\r\nlocation: http://b.example:%d/y\r\ncontent-length: 0\r\n\r\n" % files.port
    fetch, asked = fetcher(files, ["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"], allow_private=True, max_redirects=2)
    with pytest.raises(FetchFailed, match=r"media\.max_redirects"):
        await fetch.fetch(f"http://a.example:{files.port}/x")
    assert asked == ["a.example", "b.example", "b.example"]

    for location in ("http://c.example/", "http://b.example:1/", "file:///etc/passwd", "//127.0.0.1/", "gopher://a"):
        files.answer = f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
        fetch, asked = fetcher(files, ["127.0.0.1"], allow_private=True)
        with pytest.raises(AddressRefused):
            await fetch.fetch(f"http://a.example:{files.port}/x")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nDATA",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nDATA",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
    ],
)
async def test_what_no_image_could_be_is_refused(files: Files, answer: bytes) -> None:
    files.answer = answer
    fetch, _ = fetcher(files, ["127.0.0.1"], allow_private=True, max_bytes=1000)
    with pytest.raises(FetchFailed):
        await fetch.fetch(f"http://a.example:{files.port}/x")


async def test_chunks_are_put_together(files: Files) -> None:
    files.answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nDA\r\n2\r\nTA\r\n0\r\n\r\n"
    fetch, _ = fetcher(files, ["127.0.0.1"], allow_private=True)

    assert await fetch.fetch(f"http://a.example:{files.port}/x") == b"DATA"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """For a.example, signed by itself; the key is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    file = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=a.example"]
    command += ["-addext", "subjectAltName=DNS:a.example", "-keyout", str(tmp_path / "key.pem"), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return file


async def test_certificates_are_checked_for_the_name(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the connection goes to an address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nDATA")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    files = Files(port=server.sockets[0].getsockname()[1])
    try:
        stranger, _ = fetcher(files, ["127.0.0.1"], allow_private=True)
        with pytest.raises(FetchFailed):
            await stranger.fetch(f"https://a.example:{files.port}/x")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        known, _ = fetcher(files, ["127.0.0.1"], ["127.0.0.1"], allow_private=True)
        assert await known.fetch(f"https://a.example:{files.port}/x") == b"DATA"
        with pytest.raises(FetchFailed):
            await known.fetch(f"https://b.example:{files.port}/x")
    finally:
        server.close()


async def test_a_name_server_that_hangs_is_not_waited_for(files: Files) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    fetch = ImageFetcher(MediaSettings(allowed_hosts=("a.example",), timeout_s=0.1), resolve)
    with pytest.raises(FetchFailed, match=r"media\.timeout_s"):
        await fetch.fetch("http://a.example/x")
