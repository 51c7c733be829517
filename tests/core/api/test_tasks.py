"""Tasks of models: a request for another task is refused, whatever the endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from attrs import evolve
from msgspec.structs import replace

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.scripted import ScriptedBackend
from enginehouse_testkit.server_thread import server_thread

CHAT = {"role": "user", "content": "hi"}


class EmbeddingBackend(ScriptedBackend):
    """The scripted backend, with a model that says it is for embeddings."""

    def open(self, source: Any, options: Any, progress: Any) -> Any:
        engine = super().open(source, options, progress)
        engine.info = replace(engine.info, task="embed")
        return engine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    source = write_script(tmp_path_factory.mktemp("scripts") / "hello.json", ["Hel", "lo"])
    settings = Settings(
        models={
            "chatty": ModelSettings(source=source, backend="scripted"),
            "vectors": ModelSettings(source=source, backend="embedding"),
        },
        plugins=PluginsSettings(allow=()),
    )
    registry = PluginRegistry.for_settings(settings)
    registry = evolve(registry, backends={**registry.backends, "embedding": EmbeddingBackend()})
    with server_thread(settings, registry) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        while client.get("/health").json()["status"] != "ok":
            time.sleep(0.02)
        yield client


def test_models_show_their_task(client: httpx.Client) -> None:
    tasks = {model["id"]: model["task"] for model in client.get("/v1/models").json()["data"]}

    assert tasks == {"chatty": "generate", "vectors": "embed"}
    assert client.get("/v1/models/vectors").json()["task"] == "embed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
def test_a_request_for_another_task_is_refused(
    client: httpx.Client, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    response = client.post(path, json={**prompt, "model": "vectors", "stream": stream})
    error = response.json()["error"]

    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_task", "model")
    assert "'embed'" in error["message"] and "'generate'" in error["message"]
    assert "names no model" not in error["message"]
    assert client.post(path, json={**prompt, "model": "chatty"}).status_code == 200


def test_its_tokens_can_be_counted(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"model": "vectors", "content": "hi"}).status_code == 200
