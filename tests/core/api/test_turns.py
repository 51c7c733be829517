"""Callers at one model's queue over HTTP: they take turns, and none can keep the others out."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served

BOSS = KeySettings(name="boss", key="boss", scopes=("admin",))
BOSS_KEY = {"x-api-key": "boss"}


def ask(client: httpx.Client, name: str, num_tokens: int) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True}
    return client.post("/v1/completions", json=body, headers={"x-api-key": name})


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    """A model with one slot and a queue of four, of which a key may fill three."""
    model = ModelSettings(
        source=str(tmp_path), backend="fake", isolation="thread", slots=1, context=4096, options={"step_delay_s": 0.01}
    )
    settings = Settings(
        auth=AuthSettings(keys=(BOSS, *(KeySettings(name=name, key=name) for name in ("alice", "bob", "carol")))),
        models={"m": model},
        limits=LimitsSettings(max_queue=4),
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        yield client


def wait_accepted(client: httpx.Client, count: int) -> None:
    """Until the engine has accepted so many requests."""
    deadline = time.monotonic() + 60
    while True:
        listed = client.get("/admin/requests", headers=BOSS_KEY).json()["data"]
        if sum(one["prompt_tokens"] is not None for one in listed) >= count:
            return
        assert time.monotonic() < deadline, listed
        time.sleep(0.02)


def test_callers_take_turns_and_none_keeps_the_others_out(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines: Callable[[int], list[str]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, client, "alice", 4000)
        wait_accepted(client, 1)
        (running,) = client.get("/admin/requests", headers=BOSS_KEY).json()["data"]
        alice = [pool.submit(ask, client, "alice", 2) for _ in range(3)]
        wait_accepted(client, 4)
        refused = [ask(client, "alice", 1), ask(client, "alice", 1)]
        bob = pool.submit(ask, client, "bob", 1)
        wait_accepted(client, 5)
        crowded = ask(client, "carol", 1)
        with caplog.at_level("INFO", "enginehouse.access"):
            client.post(f"/admin/requests/{running['id']}/cancel", headers=BOSS_KEY)
            assert first.result().status_code == 410
            assert [one.result().status_code for one in [*alice, bob]] == [200] * 4
            ends = [line for line in access_lines(6) if "status=200" in line and "/completions" in line]

    assert {response.status_code for response in refused} == {429}
    assert refused[0].json()["error"]["code"] == "queue_full" and int(refused[0].headers["retry-after"]) >= 1
    assert crowded.status_code == 503 and crowded.json()["error"]["code"] == "model_overloaded"
    assert int(crowded.headers["retry-after"]) >= 1
    assert "key=bob" in ends[0]  # before the three that came earlier
