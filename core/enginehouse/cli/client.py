"""Connections of commands to a running server, and one request to its admin API.

Addresses are ``http://host:port``, ``https://host:port`` or ``unix:path``. A Unix domain socket also serves paths, so
its URL is ``http+unix://`` with the percent-encoded path of the socket as host, the form that other programs use;
:func:`full_url` makes it. Refusals are mapped to our exceptions.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from enginehouse.contract.errors import EnginehouseError

_UNIX = "http+unix"
_SCHEMES = ("http", "https", _UNIX)


def full_url(text: str) -> str | None:
    """Return the URL of a server given by a user, without a trailing slash; None if it is not one."""
    if text.startswith("unix:"):
        text = f"{_UNIX}://{quote(text.removeprefix('unix:').removeprefix('//'), safe='')}"
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    return text.rstrip("/") if parts.scheme in _SCHEMES and parts.netloc else None


def connection_to(url: str, timeout_s: float | None) -> http.client.HTTPConnection:
    """Return a connection to the server of ``url``, opened with the first request.

    Certificates are checked against those that the system trusts, or the variable ``SSL_CERT_FILE``.
    """
    parts = urlsplit(url)
    if parts.scheme == _UNIX:
        return _UnixConnection(unquote(parts.netloc), timeout_s)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


_MAX_BYTES = 16 * 2**20
_MAX_MESSAGE_CHARS = 2000


class ServerRefusal(EnginehouseError):
    """The server refused, or its response was not understood."""


def ask_server(
    url: str, key: str | None, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON response of a server; no timeout, since loading a model may take minutes.

    Redirects are not followed, as the key is only for the server that was named. Proxies of the environment are not
    used, as they are for the user's browsing.

    Args:
        url: the server; a trailing ``/v1`` is ignored.
        path: an unescaped path.
        body: sent as JSON.

    Raises:
        ServerRefusal: it cannot be reached, or refused; includes its message.
    """
    address = full_url(url)
    if address is None:
        raise ServerRefusal(f"{url!r} is not an address of a server; it must begin with http://, https:// or unix:")
    address = address.removesuffix("/v1")
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    whole_path = urllib.parse.urlsplit(address).path + urllib.parse.quote(path)
    try:
        with closing(connection_to(address, None)) as connection:
            connection.request(method, whole_path, data, headers)
            answer = connection.getresponse()
            said = _object(answer.read(_MAX_BYTES), f"{url}{path}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerRefusal(f"no server answers at {url}: {error or type(error).__name__}") from error
    if answer.status >= 300:
        refusal = said.get("error")
        message = refusal.get("message") if isinstance(refusal, dict) else None
        raise ServerRefusal(str(message or f"the server answered {answer.status}")[:_MAX_MESSAGE_CHARS])
    return said


def _object(body: bytes, address: str) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ServerRefusal(f"the server at {address} is not an Enginehouse server")
    return data
