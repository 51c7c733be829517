"""Fetching of images: allowed hosts only, public addresses only, bounded in bytes, time and redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from urllib.parse import urljoin, urlsplit

import h11
from attrs import frozen

from enginehouse.settings.config import MediaSettings

_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 4096
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(ValueError):
    """The URL is malformed or may not be read; the message gives the reason."""


@frozen
class Target:
    """A parsed URL. ``path`` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def is_default_port(self) -> bool:
        """True if the port may be omitted from the URL."""
        return self.port == _PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.is_default_port else f"{host}:{self.port}"


def read_url(url: str) -> Target:
    """Parse an http or https URL strictly: anything that two programs could read differently is refused.

    Raises:
        AddressRefused: ``url`` is not a valid http or https URL.
    """
    if len(url) > _MAX_URL_CHARS:
        raise AddressRefused(f"an address has at most {_MAX_URL_CHARS} characters")
    if not re.fullmatch(r"[!-\[\]-~]+", url):  # printable ASCII without space and backslash
        raise AddressRefused("it is not an http, https or data URL")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").removesuffix(".")
    except ValueError as error:
        raise AddressRefused("it is not an http, https or data URL") from error
    if parts.scheme not in _PORTS or not host:
        raise AddressRefused("it is not an http, https or data URL")
    if parts.username is not None or parts.password is not None:
        raise AddressRefused("an address with a user name is not read")
    if not (_HOST.fullmatch(host) or (parts.netloc.startswith("[") and ":" in host and "%" not in host)):
        raise AddressRefused("its host is malformed")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def is_allowed_host(target: Target, allowed: Iterable[str]) -> bool:
    """True if the settings allow a target's host.

    Args:
        allowed: ``images.example``, ``.example.org`` for all subdomains, ``*`` for every host; with a suffix such as
            ``:8080`` for that port only, without one for the default port.
    """
    for entry in allowed:
        host, colon, port = entry.rpartition(":") if re.search(r":\d+$", entry) else (entry, "", "")
        if int(port) != target.port if colon else not target.is_default_port:
            continue
        host = host.lower().strip("[]")
        if host in ("*", target.host) or (host.startswith(".") and target.host.endswith(host)):
            return True
    return False


def check_addresses(addresses: Iterable[str], *, allow_private: bool) -> list[str]:
    """Return the addresses of a host, all of which may be connected to.

    Raises:
        AddressRefused: at least one of them may not. A host with both kinds is likely to be an attack.
    """
    found = list(dict.fromkeys(addresses))
    if not found:
        raise AddressRefused("its host has no address")
    if not allow_private and not all(map(is_public, found)):
        raise AddressRefused("its host is not on the public internet (media.allow_private)")
    return found


def is_public(address: str) -> bool:
    """True if an address is public, including IPv4 addresses embedded in IPv6."""
    found: _Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved and not found.is_unspecified


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and a port to the host's addresses; raises OSError."""

_MAX_AT_ONCE = 8
_MAX_HEAD_BYTES = 32768
_READ_BYTES = 16384  # may contain thousands of tiny chunks, whose parsing blocks the event loop
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchFailed(Exception):
    """The URL could not be read; the message gives the reason without revealing anything about the local network."""


@frozen
class _Answer:
    """Response of one server: an image, or a redirect target."""

    data: bytes = b""
    location: str | None = None


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host from the system resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class ImageFetcher:
    """Fetches images for one server.

    Args:
        settings: allowed hosts and limits.
        resolve: resolves host names.
    """

    def __init__(self, settings: MediaSettings, resolve: Resolve = resolve_host) -> None:
        self._settings = settings
        self._resolve = resolve
        self._places = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> bytes:
        """Return the content at ``url``.

        Raises:
            AddressRefused: the URL, or one that it redirects to, may not be read.
            FetchFailed: the content could not be read.
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
                raise AddressRefused("it redirects from https to http")
        raise FetchFailed("it redirects too often (media.max_redirects)")

    def _allowed(self, url: str) -> Target:
        target = read_url(url)
        if not self._settings.allowed_hosts:
            raise AddressRefused("this server does not fetch images (media.allowed_hosts); send a data: URL")
        if not is_allowed_host(target, self._settings.allowed_hosts):
            raise AddressRefused("its host is not in media.allowed_hosts; send a data: URL")
        return target

    async def _get(self, target: Target) -> _Answer:
        addresses = await self._resolve(target.host, target.port)
        checked = check_addresses(addresses, allow_private=self._settings.allow_private)
        secure = await self._secure() if target.scheme == "https" else None
        # Connect to the checked address: a second lookup of the name could give another one.
        reader, writer = await asyncio.open_connection(
            checked[0], target.port, ssl=secure, server_hostname=target.host if secure else None
        )
        try:
            return await self._exchange(target, reader, writer)
        finally:
            writer.transport.abort()

    async def _secure(self) -> ssl.SSLContext:
        """TLS context, created once in another thread because loading the system's certificates takes a while."""
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
                await asyncio.sleep(0)  # read() does not yield while data is buffered
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
        """Return the redirect target, or None if the image follows."""
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
