"""Servers whose operator gives orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define, evolve

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import Settings, load_settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

PLAIN = """
[limits]
memory_budget = "20MB"
drain_s = 5

[plugins]
allow = ["samplers"]

[models.plain]
source = "plain.json"
backend = "scripted"
aliases = ["gpt-plain"]

[models."org/fake:tag"]
source = "fake"
backend = "fake"
isolation = "thread"
load = "lazy"

[models.endless]
source = "endless.json"
backend = "scripted"
"""


@define(eq=False)
class Operated:
    """A server and the configuration file that it reads."""

    client: httpx.Client
    config: Path
    url: str
    stop: Callable[[], None]

    def models(self) -> dict[str, dict[str, Any]]:
        answer = self.client.get("/admin/models")
        assert answer.status_code == 200, answer.text
        return {model["id"]: model for model in answer.json()["data"]}

    def order(self, model: str, order: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/admin/models/{model}/{order}", json=body)

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "x", "max_tokens": 3, **fields}
        return self.client.post("/v1/completions", json=body)

    def reload(self, text: str) -> httpx.Response:
        self.config.write_text(text, encoding="utf-8")
        return self.client.post("/admin/reload", json={})


@pytest.fixture
def operate(tmp_path: Path) -> Iterator[Callable[..., Operated]]:
    """Call it with the text of a configuration file to get a server that serves by it."""
    write_script(tmp_path / "plain.json", ["Hel", "lo"])
    write_script(tmp_path / "other.json", ["Bye"])
    write_script(tmp_path / "endless.json", [" tick", {"delay_s": 0.005}], loop=True)
    config = tmp_path / "enginehouse.toml"
    closing: list[Callable[[], Any]] = []

    def start(text: str = PLAIN) -> Operated:
        config.write_text(text, encoding="utf-8")

        def read() -> Settings:
            settings = load_settings(config, {})
            return evolve(settings, server=evolve(settings.server, port=0))

        settings = read()
        registry = PluginRegistry.load(settings.plugins, builtin=["fake", "scripted"])
        server = server_thread(settings, registry, read)
        running = server.__enter__()
        closing.append(lambda: server.__exit__(None, None, None))
        client = httpx.Client(base_url=running.url, timeout=30)
        closing.append(client.close)
        wait_ready(client)
        return Operated(client, config, running.url, running.begin_stop)

    yield start
    for close in reversed(closing):
        close()
