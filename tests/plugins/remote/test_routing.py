"""Several servers of one model: which one gets a request, what clients and metrics show of it, what deaths change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.types import Chat, EngineRequest, Message
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.bodies import routing_parts
from enginehouse_remote.engine import RemoteEngine
from enginehouse_remote.options import RemoteOptions
from enginehouse_remote.servers import Server
from enginehouse_testkit.served import wait_ready, wait_until
from enginehouse_testkit.server_thread import ServerThread, server_thread

pytestmark = pytest.mark.remote

SYSTEMS = [f"You are assistant {number}. {'Rules that everybody keeps. ' * 60}" for number in range(3)]


def conversation(system: int, number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation of a shared system prompt and turns of its own; a longer one begins with a shorter one."""
    messages = [{"role": "system", "content": SYSTEMS[system]}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Conversation {number}, turn {turn}: {'a question ' * 40}"})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return messages[:-1]


@pytest.fixture(scope="module")
def upstreams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerThread]]:
    """Three servers of the same computing model."""
    model = ModelSettings(
        source=str(tmp_path_factory.mktemp("fake")), backend="fake", isolation="thread", context=65536, slots=4
    )
    settings = Settings(models={"fake": model}, plugins=PluginsSettings(allow=()))
    with server_thread(settings) as one, server_thread(settings) as two, server_thread(settings) as three:
        for server in (one, two, three):
            wait_ready(server.url)
        yield [one, two, three]


def front(upstreams: list[ServerThread], **options: Any) -> Any:
    first, *others = (server.url for server in upstreams)
    model = ModelSettings(source=first, backend="remote", options={"urls": others, **options})
    return server_thread(Settings(models={"m": model}, plugins=PluginsSettings(allow=("remote",))))


def ask(url: str, messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": messages, "max_tokens": 2, **fields}
    headers = {"x-enginehouse-details": "true"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)


def cached_tokens(url: str, name: str) -> int:
    """Ask 8 conversations of three system prompts, turn by turn; return the cached tokens of all answers.

    ``name`` begins every prompt, so that nothing is cached of conversations with another name.
    """
    total = 0
    for turns in (1, 2, 3):
        for number in range(8):
            first, *others = conversation(number % 3, number, turns)
            messages = [{**first, "content": f"{name}: {first['content']}"}, *others]
            total += ask(url, messages).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return total


def test_conversations_return_to_the_server_that_has_their_prefix(upstreams: list[ServerThread]) -> None:
    with front(upstreams) as running:
        wait_ready(running.url)
        first = ask(running.url, conversation(0, 0))
        again = [ask(running.url, conversation(0, 0, turns)) for turns in (2, 3)]
        metrics = httpx.get(f"{running.url}/metrics", trust_env=False).text
        streamed = ask(running.url, conversation(0, 0, 4), stream=True)

    replica = first.json()["enginehouse"]["routed"]["replica"]
    assert (replica["reason"], replica["matched"], replica["tried"]) == ("load", 0, 0)
    assert first.headers["x-enginehouse-replica"] == f"{replica['name']}; reason=load; matched=0.00"
    for answer in again:
        shown = answer.json()["enginehouse"]["routed"]["replica"]
        assert (shown["name"], shown["reason"]) == (replica["name"], "prefix")
        assert 0.5 < shown["matched"] <= 1
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert f"{replica['name']}; reason=prefix" in streamed.headers["x-enginehouse-replica"]
    labels = f'model="m",replica="{replica["name"]}"'
    assert f"enginehouse_replica_up{{{labels}}} 1.0" in metrics
    assert f"enginehouse_replica_running_requests{{{labels}}} 0.0" in metrics
    assert f'enginehouse_replica_requests_total{{model="m",reason="prefix",replica="{replica["name"]}"}} 2.0' in metrics


def test_less_is_computed_again_than_with_the_least_busy_server(upstreams: list[ServerThread]) -> None:
    with front(upstreams, routing="load") as by_load, front(upstreams) as by_prefix:
        wait_ready(by_load.url)
        wait_ready(by_prefix.url)
        counts = cached_tokens(by_load.url, "by load"), cached_tokens(by_prefix.url, "by prefix")

    assert counts[1] > 1.2 * counts[0]


def test_one_server_has_no_replicas(upstreams: list[ServerThread]) -> None:
    with front(upstreams[:1]) as running:
        wait_ready(running.url)
        answer = ask(running.url, conversation(1, 1))
        metrics = httpx.get(f"{running.url}/metrics", trust_env=False).text

    assert answer.json()["enginehouse"]["routed"] is None
    assert "x-enginehouse-replica" not in answer.headers
    assert "enginehouse_replica" not in metrics


async def open_engine(*servers: Any, **options: Any) -> RemoteEngine:
    settings = RemoteOptions(urls=tuple(server.url for server in servers[1:]), health_interval_s=0.05, **options)
    return await asyncio.to_thread(
        RemoteBackend().open, ModelSource(servers[0].url), settings, lambda share, text: None
    )


async def send(engine: RemoteEngine, text: str, name: str) -> Any:
    request = EngineRequest(request_id=name, chat=Chat(messages=(Message(role="user", content=text),)))
    stream = await engine.submit(request)
    async for _ in stream:
        pass
    return stream.placement  # type: ignore[attr-defined]


async def test_a_dead_server_is_left_out_and_used_again(small_server: Any) -> None:
    """Its prefixes are forgotten: when it is back, its cache is empty, and their requests have moved."""
    one, two = await small_server(), await small_server()
    engine = await open_engine(one, two)
    home = await send(engine, SYSTEMS[0], "first")
    dead, alive = (one, two) if home.replica in one.url else (two, one)
    dead.stop()
    moved = await send(engine, SYSTEMS[0], "dies")
    rows = {row.replica: row for row in engine.replicas}
    stayed = await send(engine, SYSTEMS[0], "left out")
    await dead.start()
    await asyncio.to_thread(wait_until, lambda: all(row.is_up for row in engine.replicas))
    back = await send(engine, SYSTEMS[0], "back")
    other = await send(engine, SYSTEMS[1], "other")
    await engine.close()

    assert moved.replica in alive.url
    assert (moved.reason, moved.num_tried) == ("load", 1)
    assert not rows[home.replica].is_up
    assert (stayed.replica, stayed.reason, stayed.num_tried) == (moved.replica, "prefix", 0)
    assert back.replica == moved.replica
    assert (other.replica, other.reason) == (home.replica, "load")


async def test_prefixes_do_not_overload_a_server(small_server: Any) -> None:
    """With nine requests more than the other, the server of a prefix is passed over."""
    release = asyncio.Event()

    async def waits(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        await wire.text("x")
        await release.wait()
        await wire.end()

    engine = await open_engine(await small_server(waits), await small_server(waits))
    streams = [
        await engine.submit(
            EngineRequest(request_id=f"r{number}", chat=Chat(messages=(Message(role="user", content=SYSTEMS[0]),)))
        )
        for number in range(12)
    ]
    placements = [stream.placement for stream in streams]  # type: ignore[attr-defined]
    release.set()
    for stream in streams:
        async for _ in stream:
            pass
    await engine.close()

    assert [placement.reason for placement in placements] == ["load", *["prefix"] * 8, "balance", *["prefix"] * 2]
    assert len({placement.replica for placement in placements[:9]}) == 1
    assert placements[9].replica != placements[0].replica


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://user:secret@h:8000/v1", "h:8000"),
        ("https://h/v1", "h"),
        ("https://h/a/v1", "h/a"),
        ("https://h/b", "h/b"),
    ],
)
def test_names_of_servers_are_different_and_without_credentials(url: str, name: str) -> None:
    assert Server(url).name == name


def test_equal_prompts_have_equal_parts_whatever_their_parameters() -> None:
    data = {"model": "m", "seed": 4, "messages": conversation(0, 0), "tools": [{"type": "function"}]}
    longer = {**data, "seed": 9, "temperature": 0.5, "messages": conversation(0, 0, 2)}
    parts, others = list(routing_parts(data)), list(routing_parts(longer))

    assert parts[:3] == others[:3]
    assert parts[0] != next(routing_parts({**data, "tools": []}))
    assert list(routing_parts({"prompt": [1, 2]}))[-1] == msgspec.json.encode([1, 2])
