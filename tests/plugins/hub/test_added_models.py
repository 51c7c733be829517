"""Models of the hub in a running server: downloads that administrators or, if the settings say so, requests begin."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from enginehouse.settings.config import load_settings
from enginehouse_hub.hub import HuggingFaceHub
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.stand_in_hub import Repository, StandIn
from enginehouse_testkit.waiting import wait_until

ID = "owner/said:Q8_0"
SETTINGS = """
[server]
allowed_sources = ["owner/*"]
pull_on_request = {on_request}

[plugins]
allow = ["hub", "samplers"]

[models.plain]
source = "plain.json"
backend = "scripted"

[models.asked]
source = "owner/said:Q8_0"
backend = "scripted"
load = "lazy"

[models."owner/*"]
backend = "scripted"
"""


@pytest.fixture
def serve(tmp_path: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., httpx.Client]]:
    """Call it to get a client of a server beside the hub, whose new model is a script that says "Said"."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    script = Path(write_script(tmp_path / "said.json", ["Sa", "id"])).read_bytes()
    hub.repositories["owner/said"] = Repository({"main": {"m-Q8_0.gguf": script + b" " * 400_000}})
    write_script(tmp_path / "plain.json", ["Plain"])
    config = tmp_path / "enginehouse.toml"
    open_servers: list[Any] = []

    def start(on_request: str = "false") -> httpx.Client:
        config.write_text(SETTINGS.format(on_request=on_request), encoding="utf-8")
        server = served(load_settings(config, {}), reread=lambda: load_settings(config, {}))
        client = server.__enter__()
        open_servers.append(server)
        return client

    yield start
    hub.released.set()
    for server in open_servers:
        server.__exit__(None, None, None)


def model(client: httpx.Client, name: str = ID) -> dict[str, Any]:
    return dict(client.get(f"/admin/models/{name}").json())


def add(client: httpx.Client, source: str = ID, **body: Any) -> httpx.Response:
    return client.post("/admin/models", json={"source": source, "download": True, **body})


def say(client: httpx.Client, name: str = ID) -> httpx.Response:
    return client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 3})


def settle(client: httpx.Client, name: str = ID) -> dict[str, Any]:
    wait_until(lambda: model(client, name)["state"] != "loading", f"the end of the download of {name}")
    return model(client, name)


def test_a_download_shows_its_progress_is_cancelled_and_continues(
    serve: Callable[..., httpx.Client], hub: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    client, path = serve(), f"/admin/models/{ID}"
    hub.hold = "m-Q8_0.gguf"
    added = add(client)
    assert (added.status_code, added.json()["state"], added.json()["downloading"]) == (201, "loading", True), added.text
    assert hub.held.wait(30)
    wait_until(lambda: model(client)["progress"] > 0, "progress of the download")
    refused = client.post(f"{path}/unload", json={"force": True}).json()["error"]
    assert (refused["code"], "cancel-download" in refused["message"]) == ("conflict", True), refused
    assert client.post(f"{path}/download", json={}).json()["downloading"]  # joins it

    cancelled = client.post(f"{path}/cancel-download", json={})

    assert (cancelled.json()["state"], cancelled.json()["downloading"]) == ("failed", False)
    assert cancelled.json()["error"] == "its download was cancelled"
    assert client.post(f"{path}/cancel-download", json={}).status_code == 409
    assert say(client).status_code == 503 and not HuggingFaceHub().is_complete(ID)
    hub.hold = None
    hub.released.set()
    assert client.post(f"{path}/download", json={}).status_code == 200  # also if the cancelled one completed the file
    settle(client)
    assert say(client).json()["choices"][0]["text"] == "Said"
    assert client.post(f"{path}/download", json={}).status_code == 409  # nothing is missing
    asked = hub.contents_asked()  # it continued, unless the cancelled one completed the file before it noticed
    assert len(asked) == 1 or asked[-1][1] > 0
    assert "failed in download" not in caplog.text  # the end of a cancelled one is no fault of the plugin


def test_a_download_of_an_added_model_is_no_failure_in_between(serve: Callable[..., httpx.Client]) -> None:
    client, kinds, begun = serve(), list[str](), threading.Event()

    def read() -> None:
        with client.stream("GET", "/admin/events") as stream:
            for line in stream.iter_lines():
                begun.set()
                if line.startswith("data: "):
                    kinds.append(json.loads(line.removeprefix("data: "))["kind"])
                    if kinds[-1] == "unloaded":
                        return

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    add(client)
    reader.join(30)

    assert list(dict.fromkeys(kinds)) == ["added", "loading", "downloading", "unloaded"]


def test_a_failed_download_says_why_and_the_model_is_removed(serve: Callable[..., httpx.Client], hub: StandIn) -> None:
    client = serve()
    hub.spoiled.add("m-Q8_0.gguf")
    assert add(client).status_code == 201

    assert (settle(client)["state"], "m-Q8_0.gguf" in model(client)["error"]) == ("failed", True), model(client)
    assert say(client, "plain").status_code == 200
    assert client.delete(f"/admin/models/{ID}").status_code == 200
    assert client.get(f"/admin/models/{ID}").status_code == 404


def test_a_model_is_removed_during_its_download(serve: Callable[..., httpx.Client], hub: StandIn) -> None:
    client = serve()
    hub.hold = "m-Q8_0.gguf"
    add(client)
    assert hub.held.wait(30)

    assert client.delete(f"/admin/models/{ID}").status_code == 200

    assert [one["id"] for one in client.get("/admin/models").json()["data"]] == ["plain", "asked"]
    hub.hold = None
    hub.released.set()
    assert add(client).status_code == 201
    assert settle(client)["state"] == "unloaded"


REFUSALS = [
    (ID, False, (404, "source_not_found")),
    ("other/said:Q8_0", True, (403, "source_not_allowed")),
    ("owner/../said:Q8_0", True, (403, "source_not_allowed")),
]


def test_nothing_is_asked_of_the_hub(serve: Callable[..., httpx.Client], hub: StandIn) -> None:
    client = serve()

    answers = [add(client, source, download=download) for source, download, _ in REFUSALS]

    refused = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert refused == [expected for *_, expected in REFUSALS]
    assert hub.asked == []


def test_a_request_downloads_a_configured_model_only_with_the_setting(
    serve: Callable[..., httpx.Client], hub: StandIn
) -> None:
    client = serve()
    assert say(client, "asked").status_code == 503
    assert say(client, ID).status_code == 404
    assert hub.asked == []

    client = serve("true")
    assert model(client, "asked")["state"] == "unloaded"
    assert say(client, "asked").json()["choices"][0]["text"] == "Said"
    assert say(client, "owner/packed:Q8_0").status_code == 404  # only configured ones
    assert not [asked.path for asked in hub.asked if "packed" in asked.path]


def test_a_reload_adds_a_model_that_the_first_request_downloads(
    serve: Callable[..., httpx.Client], tmp_path: Path
) -> None:
    client, config = serve("true"), tmp_path / "enginehouse.toml"
    config.write_text(config.read_text("utf-8").replace("models.asked", "models.new"), encoding="utf-8")

    assert client.post("/admin/reload").json()["models"]["added"] == ["new"]
    assert model(client, "new")["state"] == "unloaded"
    assert say(client, "new").json()["choices"][0]["text"] == "Said"
