"""Connections of commands to a server: ``http://host:port``, ``https://host:port`` or ``unix:path``.

A Unix domain socket also serves paths, so its URL is ``http+unix://`` with the percent-encoded path of the socket as
host, the form that other programs use; :func:`full_url` makes it.
"""

from __future__ import annotations

import http.client
import socket
from urllib.parse import quote, unquote, urlsplit

__all__ = ["connection_to", "full_url"]

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
