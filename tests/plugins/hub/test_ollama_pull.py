"""``/api/pull`` of Ollama's API downloads from the hub, for admins only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_hub.hub import HuggingFaceHub
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.stand_in_hub import StandIn

KEYS = (KeySettings(name="root", key="root", scopes=("infer", "admin")), KeySettings(name="bob", key="bob"))


def settings(folder: Path, *plugins: str) -> Settings:
    source = write_script(folder / "hello.json", ["Hello"])
    models = {"hello": ModelSettings(source=source, backend="scripted")}
    return Settings(auth=AuthSettings(keys=KEYS), models=models, plugins=PluginsSettings(allow=plugins))


@pytest.fixture
def client(tmp_path: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client with the scope ``admin``."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with served(settings(tmp_path, "hub", "ollama"), headers={"authorization": "Bearer root"}) as client:
        yield client


def pull(client: httpx.Client, model: Any, **more: Any) -> list[dict[str, Any]]:
    response = client.post("/api/pull", json={"model": model, **more})
    return [json.loads(line) for line in response.text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["owner/packed:Q4_K_M", "hf.co/owner/packed:q4_k_m"])
def test_a_pull_downloads_and_tells_how_far_it_is(client: httpx.Client, name: str) -> None:
    first, *steps, advice, last = pull(client, name)

    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert "source = 'owner/packed:" in advice["status"]
    assert [step["completed"] for step in steps] == sorted(step["completed"] for step in steps)
    assert all(0 <= step["completed"] <= step["total"] for step in steps) and steps
    assert HuggingFaceHub().is_complete("owner/packed:Q4_K_M")
    assert pull(client, name, stream=False) == [{"status": "success"}]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("llama3.2:1b", 400, "no hub has ids of this form"),
        ("../../etc/passwd", 400, "no hub has ids of this form"),
        ("x" * 100_000, 400, "x" * 100 + "'"),
        ("", 400, "model: is required"),
        (7, 400, "model"),
    ],
)
def test_a_name_of_no_hub_is_refused(client: httpx.Client, name: Any, status: int, said: str) -> None:
    response = client.post("/api/pull", json={"model": name})

    assert response.status_code == status and said in response.json()["error"]
    assert len(response.text) < 500


@pytest.mark.parametrize("name", ["owner/none", "owner/gated", "owner/pickles"])
def test_what_cannot_be_downloaded_ends_with_the_reason(client: httpx.Client, name: str) -> None:
    *_, last = pull(client, name)
    whole = client.post("/api/pull", json={"model": name, "stream": False})

    assert last.keys() == {"error"} and name in last["error"]
    assert (whole.status_code, whole.json()) == (500, last)


def test_only_admins_may_pull(client: httpx.Client, hub: StandIn) -> None:
    refused = client.post("/api/pull", json={"model": "owner/plain"}, headers={"authorization": "Bearer bob"})

    assert refused.status_code == 403 and hub.asked == []


def test_without_a_hub_it_is_refused_by_name(tmp_path: Path) -> None:
    with served(settings(tmp_path, "ollama"), headers={"authorization": "Bearer root"}) as client:
        response = client.post("/api/pull", json={"model": "owner/plain"})

        assert response.status_code == 400 and "enginehouse[hub]" in response.json()["error"]
        assert pull(client, "hello") == [{"status": "pulling manifest"}, {"status": "success"}]
