"""Servers for the tests of endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from attrs import evolve, frozen

from enginehouse.api.openai.surface import openai_surface
from enginehouse.api.openapi.document import build_document
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.application import make_state
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

PLUGINS = ("llguidance", "parsers", "samplers")
LIMITS = LimitsSettings(max_tokens=64, max_choices=4)
CONTEXT = 1024


@frozen
class Endpoints:
    """A running server; its first model answers."""

    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.answer("/v1/completions", **body)

    def tokens(self, **body: Any) -> list[int]:
        return self.answer("/tokenize", **body)["tokens"]

    def stream(self, path: str, **body: Any) -> list[str]:
        """What follows ``data:``, event by event."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return [line.removeprefix("data: ") for line in lines]


def serve(settings: Settings) -> Iterator[Endpoints]:
    with served(settings, timeout=60) as client:
        yield Endpoints(client)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """The fake model behind the real engine; `filling` is one that fills gaps."""
    source = str(tmp_path_factory.mktemp("fake"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=CONTEXT)
    filling = evolve(model, options={"infill_tokens": ["<|bos|>", "<|im_start|>", "<|eos|>"]})
    yield from serve(
        Settings(models={"fake": model, "filling": filling}, plugins=PluginsSettings(allow=PLUGINS), limits=LIMITS)
    )


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """An engine that says a known text."""
    source = write_script(tmp_path_factory.mktemp("script") / "hello.json", ["Hel", "lo", " wor", "ld"])
    models = {"hello": ModelSettings(source=source, backend="scripted")}
    yield from serve(Settings(models=models, plugins=PluginsSettings(allow=())))


@pytest.fixture(scope="session")
def starter() -> Iterator[Endpoints]:
    """SmolLM2-135M-Instruct, whose vocabulary is a real one."""
    models = {"starter": ModelSettings(source="starter", context=CONTEXT, options={"threads": 1})}
    yield from serve(Settings(models=models, plugins=PluginsSettings(allow=("llamacpp", "starter"))))


@pytest.fixture(scope="session", params=["fake", pytest.param("starter", marks=pytest.mark.llamacpp)])
def model(request: pytest.FixtureRequest) -> Endpoints:
    """A model that computes."""
    return request.getfixturevalue(request.param)


STATE = make_state(Settings(plugins=PluginsSettings(allow=())))
ROUTES = openai_surface(STATE).routes
DOCUMENT = build_document(ROUTES, {}, LIMITS)
