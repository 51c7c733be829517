"""``/ui``: the pages of plugins, as static files under one strict policy; ``GET /`` redirects browsers to the first.

The files are read once, at start, and a request can only name one of them: no path leads out of a folder. Their names
have no hashes, so browsers revalidate each, and get a 304 for one that they have.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from attrs import frozen
from litestar.types import HTTPScope, Send

from enginehouse.api.http.access import record_of
from enginehouse.api.http.origins import Headers
from enginehouse.contract.page import Page
from enginehouse.settings.config import ServerSettings

_log = logging.getLogger("enginehouse.server")

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Suffixes of the files that are served, with their types."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html dompurify"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    ("cache-control", "no-cache"),
)


@frozen
class _File:
    """One file, as it is sent."""

    media_type: str
    tag: str
    plain: bytes

    @cached_property
    def packed(self) -> bytes:
        """The compressed content; made when it is first asked for, as most servers show no page."""
        return gzip.compress(self.plain, mtime=0)

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(_TYPES[path.suffix], tag, content)


class Pages:
    """The pages that are on; none if ``server.ui`` is false, or unset on a server that other machines reach."""

    def __init__(self, pages: Iterable[Page], server: ServerSettings) -> None:
        self._names: list[str] = []
        self._files: dict[str, _File] = {}
        for page in pages if server.has_pages else ():
            try:
                found = {f"/ui/{page.name}/{name}": _File.read(path) for name, path in _files_of(page.folder)}
            except OSError as error:
                _log.error("the page %r is left out: its files cannot be read: %s", page.name, error)
                continue
            self._names.append(page.name)
            self._files |= found

    def owns(self, scope: HTTPScope, headers: Headers) -> bool:
        """Return True for an address below ``/ui``, and for a browser's ``GET /``; they need no key."""
        if not self._names or scope["method"] not in ("GET", "HEAD"):
            return False
        path = scope["path"]
        return path.startswith("/ui/") or path == "/ui" or (path == "/" and b"text/html" in headers.get(b"accept", b""))

    async def answer(self, scope: HTTPScope, headers: Headers, send: Send) -> bool:
        """Send a file, or lead to a page; return False for any other request, and for a file that does not exist."""
        if not self.owns(scope, headers):
            return False
        has_body = scope["method"] == "GET"
        if (place := self._redirect(scope["path"])) is not None:
            await _send(send, 307, [("location", place), ("content-length", "0")])
        elif (file := self._find(scope["path"])) is not None:
            record_of(scope).endpoint = "/ui"
            await _send_file(send, file, headers, has_body=has_body)
        else:
            return False
        return True

    def _redirect(self, path: str) -> str | None:
        """Return the address of a page relative to ``path``, so that it holds below a proxy's prefix too."""
        if path in ("/", "/ui"):
            return f"ui/{self._names[0]}/"
        if path == "/ui/":
            return f"{self._names[0]}/"
        name = path.removeprefix("/ui/")
        return f"{name}/" if name in self._names else None

    def _find(self, path: str) -> _File | None:
        return self._files.get(f"{path}index.html" if path.endswith("/") else path)


def _files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names, with slashes, and paths of the files to serve."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_linked = any(parent.is_symlink() for parent in [path, *path.parents[: len(parts) - 1]])
        if path.suffix in _TYPES and path.is_file() and not is_linked and not any(map(_is_hidden, parts)):
            yield "/".join(parts), path


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


async def _send_file(send: Send, file: _File, headers: Headers, *, has_body: bool) -> None:
    fields = [("content-type", file.media_type), ("etag", file.tag), ("vary", "accept-encoding")]
    if file.tag in headers.get(b"if-none-match", b"").decode("latin-1"):
        await _send(send, 304, fields)
        return
    content = file.plain
    if re.search(rb"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", headers.get(b"accept-encoding", b"")):
        content = file.packed
        fields.append(("content-encoding", "gzip"))
    await _send(send, 200, [*fields, ("content-length", str(len(content)))], content if has_body else b"")


async def _send(send: Send, status: int, fields: Iterable[tuple[str, str]], content: bytes = b"") -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (*fields, *_HEADERS)]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": content, "more_body": False})
