"""Reads an image from an address that the settings allow: one connection per hop, to an address that was checked.

Everything is bounded: hosts, redirects, bytes, time, and how many are read at once. Nothing is decompressed, no cookie
or credential is sent, and what a server answers reaches the client only as an image or as a status.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urljoin

import h11
from attrs import frozen

from enginehouse.pipeline.media.addresses import AddressRefused, Target, check_addresses, is_allowed_host, read_url
from enginehouse.settings.config import MediaSettings

__all__ = ["FetchFailed", "ImageFetcher", "Resolve", "resolve_host"]

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host and a port to the host's addresses; raises OSError."""

_MAX_AT_ONCE = 8
_MAX_HEAD_BYTES = 32768
_READ_BYTES = 16384  # may hold thousands of tiny chunks, whose reading holds up the event loop
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchFailed(Exception):
    """The address could not be read; the message says why, and tells nothing about the network here."""


@frozen
class _Answer:
    """What one server said: an image, or where else it lies."""

    data: bytes = b""
    location: str | None = None


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host, asked from the system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class ImageFetcher:
    """Reads images for one server.

    Args:
        settings: what is allowed.
        resolve: finds addresses of hosts.
    """

    def __init__(self, settings: MediaSettings, resolve: Resolve = resolve_host) -> None:
        self._settings = settings
        self._resolve = resolve
        self._places = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> bytes:
        """What lies at ``url``.

        Raises:
            AddressRefused: the address, or one that it leads to, may not be read.
            FetchFailed: it could not be read.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout_s), self._places:
                return await self._follow(url)
        except TimeoutError as error:
            raise FetchFailed(f"it could not be read within {settings.timeout_s:g} s (media.timeout_s)") from error
        except (OSError, h11.ProtocolError) as error:
            raise FetchFailed("it could not be read") from error

    async def _follow(self, url: str) -> bytes:
        target = self._allowed(url)
        for _ in range(self._settings.max_redirects + 1):
            answer = await self._get(target)
            if answer.location is None:
                return answer.data
            url = urljoin(url, answer.location)
            was_secure, target = target.scheme == "https", self._allowed(url)
            if was_secure and target.scheme != "https":
                raise AddressRefused("it leads from https to http")
        raise FetchFailed("it leads on and on (media.max_redirects)")

    def _allowed(self, url: str) -> Target:
        target = read_url(url)
        if not self._settings.allowed_hosts:
            raise AddressRefused("this server reads no addresses (media.allowed_hosts); send a data: URL")
        if not is_allowed_host(target, self._settings.allowed_hosts):
            raise AddressRefused("it lies at a host that media.allowed_hosts does not list; send a data: URL")
        return target

    async def _get(self, target: Target) -> _Answer:
        addresses = await self._resolve(target.host, target.port)
        checked = check_addresses(addresses, allow_private=self._settings.allow_private)
        secure = await self._secure() if target.scheme == "https" else None
        # The address that was checked is the one that is connected to: a name could mean another one the next time.
        reader, writer = await asyncio.open_connection(
            checked[0], target.port, ssl=secure, server_hostname=target.host if secure else None
        )
        try:
            return await self._exchange(target, reader, writer)
        finally:
            writer.transport.abort()

    async def _secure(self) -> ssl.SSLContext:
        """Made once, on another thread: the certificates of the system take a while to read."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    async def _exchange(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Answer:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        headers = {"host": target.authority, "accept": "image/*", "accept-encoding": "identity", "connection": "close"}
        request = h11.Request(method="GET", target=target.path, headers=list(headers.items()))
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        data = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
                await asyncio.sleep(0)  # what has arrived is read without a pause
            elif isinstance(event, h11.Response):
                location = self._check_head(event)
                if location is not None:
                    return _Answer(location=location)
            elif isinstance(event, h11.Data):
                data += event.data
                self._check_size(len(data))
            elif isinstance(event, h11.EndOfMessage):
                return _Answer(data=bytes(data))
            elif not isinstance(event, h11.InformationalResponse):
                raise FetchFailed("it could not be read")

    def _check_head(self, response: h11.Response) -> str | None:
        """Where else to look; None when the image follows."""
        headers = {name: value.decode("latin-1") for name, value in response.headers}
        if response.status_code in _REDIRECTS and b"location" in headers:
            return headers[b"location"]
        if response.status_code != 200:
            raise FetchFailed(f"its server answered with status {response.status_code}")
        if headers.get(b"content-encoding", "identity").strip().lower() != "identity":
            raise FetchFailed("its server sent it compressed")
        length = headers.get(b"content-length", "0")
        self._check_size(int(length) if length.isdigit() else 0)
        return None

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._settings.max_bytes:
            raise FetchFailed(f"it has more than {self._settings.max_bytes} bytes (media.max_bytes)")
