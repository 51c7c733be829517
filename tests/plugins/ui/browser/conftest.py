"""The page in Chromium, on a scripted model for exact output and on the fake backend for marks, caches and a crash.

After every test: no error in the console, no report of the Content-Security-Policy, no failed request, and no request
to another origin.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from enginehouse_testkit.server import ServerProcess, started_server

from .harness import LIMIT_MS, Watched, configured

NAMES = ("chromium", "chromium-browser", "google-chrome")
expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started_server("--config", configured(tmp_path_factory.mktemp("ui"))) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def watched_pages(browser: Browser) -> Iterator[Callable[..., tuple[Page, Watched]]]:
    """Call it with the server's URL and options of the context; checks every page at the end."""
    opened: list[tuple[BrowserContext, Watched]] = []

    def make(url: str, **options: Any) -> tuple[Page, Watched]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(LIMIT_MS)
        watched = Watched(context, url)
        opened.append((context, watched))
        return context.new_page(), watched

    yield make
    for context, watched in opened:
        context.close()
        assert watched.problems == []
        assert watched.dialogs == []


@pytest.fixture
def page(server: ServerProcess, watched_pages: Any) -> Page:
    page, _ = watched_pages(server.url)
    page.goto(f"{server.url}/", wait_until="networkidle")
    return page
