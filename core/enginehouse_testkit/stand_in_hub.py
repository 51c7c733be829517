"""A model hub on this machine: a real HTTP server that answers as the Hugging Face hub does, and can fail on demand.

Small files are git's and come from the hub itself; large ones are LFS, to which the hub redirects: their bytes come
from another host (``localhost`` beside ``127.0.0.1``), which must never see the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import define, field, frozen

__all__ = ["Asked", "Repository", "StandIn", "commit_of", "digest_of", "stand_in"]


def commit_of(name: str) -> str:
    """Return a commit's id, made from any name."""
    return hashlib.sha1(name.encode()).hexdigest()


def digest_of(path: str, content: bytes) -> str:
    """Return the name of a content in the cache, which is the hub's ETag."""
    if _is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin"))


@define
class Repository:
    """One model: for each branch, tag or commit its files; ``newer`` maps branches to their present revisions."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False
    newer: dict[str, str] = field(factory=dict)

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, tag or commit."""
        if revision in self.revisions:
            return commit_of(self.newer.get(revision, revision))
        return next((commit_of(name) for name in self.revisions if commit_of(name) == revision), None)

    def files(self, commit: str) -> Mapping[str, bytes]:
        """Return the files of a commit by their paths."""
        return next(files for name, files in self.revisions.items() if commit_of(name) == commit)


@frozen
class Asked:
    """A request that came. ``start`` is the first byte that was asked for."""

    host: str
    path: str
    token: str | None
    start: int


@define(eq=False)
class StandIn:
    """The hub, with the faults that it shows.

    Attributes:
        cut_after: bytes after which a connection that sends this file's content is closed, each time.
        num_cuts: number of connections that may still be cut.
        ranges: contents can begin in the middle.
        spoiled: files whose content arrives with a wrong byte.
        status: answer every question about a repository with this status.
        moved: old to new id of renamed repositories.
        hold: file whose content stops half-way until ``released`` is set; ``held`` is set then.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(factory=dict)
    asked: list[Asked] = field(factory=list)
    cut_after: dict[str, int] = field(factory=dict)
    num_cuts: int = 0
    ranges: bool = True
    spoiled: set[str] = field(factory=set)
    status: int | None = None
    moved: dict[str, str] = field(factory=dict)
    hold: str | None = None
    held: threading.Event = field(factory=threading.Event)
    released: threading.Event = field(factory=threading.Event)
    token: str = "hf_right"

    def contents_asked(self) -> list[tuple[str, int]]:
        """Return the names of the contents that were asked for, each with its first byte."""
        return [
            (asked.path.rpartition("/")[2], asked.start)
            for asked in self.asked
            if ("/resolve/" in asked.path and not _is_lfs(asked.path)) or asked.path.startswith("/cdn/")
        ]


@contextlib.contextmanager
def stand_in(**repositories: Repository) -> Iterator[StandIn]:
    """Run a hub with these repositories; ``owner__name`` is ``owner/name``."""
    hub = StandIn(repositories={name.replace("__", "/"): value for name, value in repositories.items()})

    class Handler(_Handler):
        standing = hub

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that leave."""

    with Server(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    standing: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        hub = self.standing
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        start = int((re.findall(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0])[0])
        hub.asked.append(Asked(self.headers["Host"].partition(":")[0], path, token, start))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._describe(found[1], found[2], token)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3], token, start)
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self._content(found[3], hub.repositories[found[1]].files(found[2])[found[3]], start)
        else:
            self._say(404, {"error": "no such page"})

    def _describe(self, model: str, revision: str, token: str | None) -> None:
        hub = self.standing
        if hub.status is not None:
            self._say(hub.status, {"error": "told to"}, {"Retry-After": "0"})
            return
        if model in hub.moved:
            self._say(307, {}, {"Location": f"/api/models/{hub.moved[model]}/revision/{revision}?blobs=true"})
            return
        repository = self._allowed(model, token, for_content=False)
        if repository is None:
            return
        commit = repository.commit(revision)
        if commit is None:
            self._say(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for path, content in repository.files(commit).items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": commit_of(path)}
            if _is_lfs(path):
                entry["lfs"] = {"sha256": digest_of(path, content), "size": len(content), "pointerSize": 130}
            else:
                entry["blobId"] = digest_of(path, content)
            siblings.append(entry)
        self._say(200, {"id": model, "sha": commit, "siblings": siblings})

    def _resolve(self, model: str, commit: str, path: str, token: str | None, start: int) -> None:
        model = self.standing.moved.get(model, model)
        repository = self._allowed(model, token, for_content=True)
        if repository is None:
            return
        content = repository.files(commit)[path]
        if _is_lfs(path):
            place = f"http://localhost:{self.server.server_port}/cdn/{model}/{commit}/{path}"  # type: ignore[attr-defined]
            headers = {"Location": place, "X-Linked-Etag": f'"{digest_of(path, content)}"', "X-Repo-Commit": commit}
            self._say(302, {}, headers)
        else:
            self._content(path, content, start)

    def _allowed(self, model: str, token: str | None, *, for_content: bool) -> Repository | None:
        hub = self.standing
        repository = hub.repositories.get(model)
        if token not in (None, hub.token, "hf_other"):
            self._say(401, {"error": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and token != hub.token):
            code = 401 if token is None else 404
            self._say(code, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif repository.gated and for_content and token != hub.token:
            self._say(401 if token is None else 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        else:
            return repository
        return None

    def _content(self, path: str, content: bytes, start: int) -> None:
        hub = self.standing
        start = start if hub.ranges else 0
        rest = content[start:]
        if path in hub.spoiled and rest:
            rest = rest[:-1] + bytes([rest[-1] ^ 1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("ETag", f'"{digest_of(path, content)}"')
        self.end_headers()
        if hub.hold == path:
            self.wfile.write(rest[: len(rest) // 4])
            time.sleep(0.5)  # progress is shown some times a second
            self.wfile.write(rest[len(rest) // 4 : len(rest) // 2])
            hub.held.set()
            hub.released.wait()
            self.wfile.write(rest[len(rest) // 2 :])
        elif path in hub.cut_after and hub.num_cuts > 0:
            hub.num_cuts -= 1
            self.wfile.write(rest[: hub.cut_after[path]])
            self.close_connection = True
        else:
            self.wfile.write(rest)

    def _say(self, status: int, data: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
