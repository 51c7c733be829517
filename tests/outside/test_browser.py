"""A web page in Chromium: what CORS lets a page of an allowed origin see, and one of any other origin not."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent / "browser" / "page.html"
KEY = "a-key"
LIMIT_S = 60
NAMES = ("chromium", "chromium-browser", "google-chrome")


class _Pages(ThreadingHTTPServer):
    """Serves the page and takes its reports."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()


class _Handler(BaseHTTPRequestHandler):
    server: _Pages

    def do_GET(self) -> None:
        self._answer(PAGE.read_bytes() if self.path.startswith("/?") else b"")

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@pytest.fixture(scope="module")
def pages() -> Iterator[_Pages]:
    with _Pages() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def api(pages: _Pages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that pages of 127.0.0.1, but not those of localhost, may call with the key."""
    folder = tmp_path_factory.mktemp("browser")
    words = [item for word in ("One", " two", " three") for item in (word, {"delay_s": 0.2})]
    source = write_script(folder / "words.json", words)
    config = folder / "enginehouse.toml"
    config.write_text(
        f'[server]\ncors_origins = ["http://127.0.0.1:{pages.server_port}"]\n'
        f'[auth]\nkeys = ["{KEY}"]\n[models.words]\nsource = {json.dumps(source)}\nbackend = "scripted"\n',
        encoding="utf-8",
    )
    with started_server("--config", config) as process:
        assert process.url is not None
        yield process.url


@pytest.fixture
def visit(pages: _Pages, api: str, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Call it with the host under which the page is opened; what the page reported."""
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("chromium is not installed")

    def run(host: str) -> dict[str, Any]:
        address = f"http://{host}:{pages.server_port}/?api={api}&key={KEY}"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
        browser = subprocess.Popen(
            [chromium, *options, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return pages.reports.get(timeout=LIMIT_S)
        finally:
            browser.terminate()
            browser.wait(LIMIT_S)

    return run


def test_h31_a_page_of_an_allowed_origin_sees_every_answer(visit: Callable[[str], dict[str, Any]]) -> None:
    seen = visit("127.0.0.1")

    assert seen["answer"]["status"] == 200
    assert seen["answer"]["body"]["choices"][0]["message"]["content"] == "One two three"
    assert seen["ignored"]["ignored"] == "no_such_field"
    assert seen["streamed"]["status"] == 200
    assert seen["streamed"]["text"].endswith("data: [DONE]\n\n")
    assert seen["streamed"]["num_reads"] >= 3
    assert seen["refused"]["status"] == 400
    assert seen["refused"]["body"]["error"]["param"] == "temperature"
    assert seen["unauthorized"]["status"] == 401
    assert seen["unauthorized"]["body"]["error"]["code"] == "invalid_api_key"
    assert [model["id"] for model in seen["models"]["data"]] == ["words"]


def test_h31_a_page_of_another_origin_sees_nothing(visit: Callable[[str], dict[str, Any]]) -> None:
    seen = visit("localhost")

    assert set(seen) == {"answer", "ignored", "streamed", "refused", "unauthorized", "models"}
    assert all(set(found) == {"failed"} for found in seen.values())
