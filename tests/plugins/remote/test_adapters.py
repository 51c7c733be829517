"""Adapters of the servers behind a remote model: named as these servers do, and never answered by the base model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import AdapterNotFound, ModelLoadError, UnsupportedParameter
from enginehouse.contract.types import Chat, EngineRequest, Message
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import open_engine, plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import AdapterSettings
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.options import RemoteOptions
from enginehouse_testkit.fake_adapters import write_fake_adapter
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

from .conftest import SmallServer, Wire, says_hello

pytestmark = pytest.mark.remote

StartSmall = Callable[..., Awaitable[SmallServer]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of a server with adapters, and of one whose model is that server's."""
    folder = tmp_path_factory.mktemp("adapters")
    there = {
        name: AdapterSettings(source=str(write_fake_adapter(folder / f"{name}.json", number)), scale=0.5)
        for number, name in enumerate(("sql", "tone"), 1)
    }
    models = {
        "x": ModelSettings(
            source=str(folder), backend="fake", isolation="thread", adapters=there, options={"mixing": "mixed"}
        )
    }
    here = {
        "sql": AdapterSettings(source="sql"),
        "style": AdapterSettings(source="x:tone", scale=0.5),
        "lost": AdapterSettings(source="lost"),
    }
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=("samplers",)))) as upstream:
        wait_ready(upstream.url)
        remote = ModelSettings(source=upstream.url, backend="remote", adapters=here)
        plugins = PluginsSettings(allow=("remote", "samplers"))
        with server_thread(Settings(models={"big": remote}, plugins=plugins)) as running:
            wait_ready(running.url)
            with (
                httpx.Client(base_url=upstream.url, timeout=120, trust_env=False) as base,
                httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client,
            ):
                yield base, client


def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    return client.post("/v1/chat/completions", json=body | fields)


def text_of(client: httpx.Client, model: str, **fields: Any) -> str:
    answer = ask(client, model, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_answers_are_those_of_the_adapters_there(servers: tuple[httpx.Client, httpx.Client]) -> None:
    """Names, sums and scales; the scale of the settings here is written out, whatever that of the other server is."""
    base, client = servers
    for model, fields, asked in (
        ("big", {}, {}),
        ("big:sql", {}, {"sql": 1}),
        ("big", {"peft": "sql"}, {"sql": 1}),
        ("big:style", {}, {"tone": 0.5}),
        ("big", {"adapters": {"sql": 0.7, "style": 0.3}}, {"sql": 0.7, "tone": 0.3}),
    ):
        assert text_of(client, model, **fields) == text_of(base, "x", adapters=asked), (model, fields)
    assert text_of(client, "big:sql") != text_of(client, "big")
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == ["big", "big:sql", "big:style", "big:lost"]


def test_adapters_that_are_missing_there_are_not_found(servers: tuple[httpx.Client, httpx.Client]) -> None:
    _, client = servers
    for model, fields in (("big:lost", {}), ("big", {"adapters": ["sql", "lost"]})):
        answer = ask(client, model, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "adapter_not_found"), answer.text
        assert "lost" in error["message"]


def _request(*adapters: Adapter) -> EngineRequest:
    return EngineRequest(request_id="r", chat=Chat(messages=(Message(role="user", content="hi"),)), adapters=adapters)


async def _text(server: SmallServer, request: EngineRequest) -> list[Any]:
    source, options = ModelSource(server.url), RemoteOptions()
    engine: Any = await asyncio.to_thread(RemoteBackend().open, source, options, lambda share, what: None)
    try:
        return [event async for events in await engine.submit(request) for event in events]
    finally:
        await engine.close()


async def test_vllm_is_asked_for_the_adapter_as_a_model(small_server: StartSmall) -> None:
    async def knows_sql(request: dict[str, Any], wire: Wire) -> None:
        if request["model"] in ("big", "sql"):
            await says_hello(request, wire)
        else:
            error = {"message": f"The model `{request['model']}` does not exist.", "code": 404}
            wire.body({"error": error}, 404)

    server = await small_server(knows_sql, "vllm")
    await _text(server, _request(Adapter("mine", "sql")))
    assert [request["model"] for request in server.requests] == ["sql"]
    with pytest.raises(AdapterNotFound, match="does not exist"):
        await _text(server, _request(Adapter("mine", "other")))
    for adapters in ((Adapter("mine", "sql", scale=0.5),), (Adapter("a", "sql"), Adapter("b", "other"))):
        with pytest.raises(UnsupportedParameter, match="one adapter"):
            await _text(server, _request(*adapters))
    assert len(server.requests) == 2


async def test_servers_that_may_answer_with_the_base_model_are_not_asked(small_server: StartSmall) -> None:
    server = await small_server()
    with pytest.raises(UnsupportedParameter, match="adapters"):
        await _text(server, _request(Adapter("mine", "sql")))
    assert not server.requests


async def test_settings_with_adapters_for_a_server_without_are_refused(small_server: StartSmall) -> None:
    server = await small_server()
    settings = ModelSettings(source=server.url, backend="remote", adapters={"mine": AdapterSettings(source="sql")})
    whole = Settings(models={"big": settings}, plugins=PluginsSettings(allow=("remote",)))
    plan = plan_model("big", settings, PluginRegistry.load(whole.plugins))
    with pytest.raises(ModelLoadError, match=r"models\.big\.adapters: this model takes no adapters"):
        await open_engine(plan, settings, whole, lambda share, what: None)
