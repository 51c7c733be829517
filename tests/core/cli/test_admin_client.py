"""Commands that ask a running server: the key goes to the server that was named, and nowhere else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from enginehouse.cli.target import ServerRefusal, ask_server


class Handler(BaseHTTPRequestHandler):
    """Notes who asks; ``/away`` leads to ``/here``."""

    seen: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("authorization")))
        body = json.dumps({"path": self.path}).encode()
        self.send_response(302 if self.path == "/away" else 200)
        self.send_header("location", "/here")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_no_proxy_of_the_environment_sees_the_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    assert ask_server(url, "secret", "GET", "/here") == {"path": "/here"}


def test_no_redirect_takes_the_key_along(url: str) -> None:
    with pytest.raises(ServerRefusal, match="the server answered 302"):
        ask_server(url, "secret", "GET", "/away")

    assert Handler.seen == [("/away", "Bearer secret")]
