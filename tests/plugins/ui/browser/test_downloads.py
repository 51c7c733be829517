"""Models are added, downloaded and removed in the page, beside a hub on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server
from enginehouse_testkit.stand_in_hub import Repository, StandIn, stand_in

from .harness import show

SETTINGS = """
[server]
models_dir = "models"
allowed_sources = ["owner/*"]
[limits]
memory_budget = 1
[models.plain]
source = "said.json"
backend = "scripted"
load = "lazy"
[models.other]
source = "fake"
backend = "fake"
load = "lazy"
[models."owner/*"]
backend = "scripted"
[models."large*"]
backend = "fake"
"""
ID = "owner/said:Q8_0"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandIn]:
    script = Path(write_script(tmp_path / "said.json", ["Sa", "id"])).read_bytes()
    with stand_in(owner__said=Repository({"main": {"m-Q8_0.gguf": script + b" " * 400_000}})) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path, hub: StandIn, watched_pages: Any) -> Iterator[Page]:
    """The view of models on a narrow screen."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "notes.txt").write_text("not a model", encoding="utf-8")
    config = tmp_path / "enginehouse.toml"
    config.write_text(SETTINGS, encoding="utf-8")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "*"}
    with started_server("--config", config, env=env, cwd=tmp_path) as server:
        page, watched = watched_pages(server.url, viewport={"width": 320, "height": 800})
        watched.expected = [r"status of (403|404|409|507)"]  # the browser's lines on refusals
        page.goto(f"{server.url}/", wait_until="networkidle")
        show(page, "models")
        page.get_by_text("Add a model").click()
        yield page
        page.close()  # before the server, whose end it would report
        hub.released.set()


def add(page: Page, source: str, name: str = "") -> None:
    page.get_by_label("Source", exact=True).fill(source)
    page.get_by_label("Name (the").fill(name)
    page.get_by_role("button", name="Add", exact=True).click()


def row(page: Page, name: str = ID) -> Any:
    return page.locator("tr", has=page.get_by_role("button", name=name, exact=True))


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("other/model", "", "allowed by server.allowed_sources"),
        ("none.gguf", "", "no file or folder"),
        ("notes.txt", "plain", "already has the name"),
        ("notes.txt", "large", "memory"),
    ],
    ids=["403", "404", "409", "507"],
)
def test_refusals_say_why(models: Page, source: str, name: str, said: str) -> None:
    add(models, source, name)

    problem = models.get_by_role("alert").filter(has_text=said)
    expect(problem).to_be_visible()
    assert models.evaluate("document.documentElement.scrollWidth") <= 320


def test_a_model_is_downloaded_stopped_continued_and_removed(models: Page, hub: StandIn) -> None:
    hub.hold = "m-Q8_0.gguf"
    add(models, ID)
    models.get_by_role("button", name="Download them and add the model").click()
    expect(row(models).get_by_role("progressbar")).not_to_have_js_property("value", 0)
    expect(row(models)).to_contain_text("of 0 MB")

    row(models).get_by_role("button", name="Stop the download").click()
    failed = models.get_by_role("alert").filter(has_text="its download was cancelled")
    expect(failed).to_be_in_viewport(ratio=1)  # not cut by the table, which scrolls sideways
    hub.hold = None
    hub.released.set()
    row(models).get_by_role("button", name="Download").click()
    expect(row(models)).to_contain_text("unloaded")
    row(models).get_by_role("button", name="Load").click()
    expect(row(models)).to_contain_text("ready")
    row(models).get_by_role("button", name="Remove").click()

    expect(row(models)).to_have_count(0)
    expect(models.get_by_text(f"{ID} is no longer served")).to_be_visible()
