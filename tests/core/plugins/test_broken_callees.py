"""Routers, compressors, preparers, surfaces, authenticators and listeners that break, in the server process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

from .harness import FlakyServer, Place, cells

CONFIG = """
[limits]
plugin_timeout_s = 3.0
[auth]
authenticators = ["flaky_kit"]
[[auth.keys]]
name = "ours"
key = "ours"
scopes = ["infer", "admin", "metrics"]
[router]
strategy = "flaky"
default = "broken"
[models.broken]
source = "."
backend = "fake"
compressor = { method = "flaky", min_tokens = 0 }
"""
AUTO = {"model": "auto"}

DEEDS = ("raise", "type", "exit", "interrupt", "slow", "hang")

PLACES = [
    Place(
        name="router.route",
        fields=AUTO,
        outcome="goes on",
        slow_ms=10,
        deeds=DEEDS,
        quick=("raise", "type", "interrupt", "slow"),
    ),
    Place(name="compressor.compress", fields={"compression": True}, outcome="goes on"),
    Place(name="preparer.prepare_request", fields={"flaky_prepare": True}, owner="flaky_preparer", deeds=DEEDS),
]


SURFACE = [
    *(Place(name=f"surface.{name}", deeds=DEEDS) for name in ("requests", "assemble", "handle", "push", "whole")),
    *(Place(name=f"surface.{name}") for name in ("opening", "close", "stream of its reply")),
]


@pytest.fixture(scope="module")
def flaky(start_flaky: Callable[[str], FlakyServer]) -> FlakyServer:
    return start_flaky(CONFIG)


@pytest.mark.parametrize(("place", "deed"), cells(PLACES))
def test_object_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    # A text of its own, as results of compressors are kept.
    long = [{"role": "user", "content": f"{place.name} {deed}. " * 40}, {"role": "user", "content": "Hello"}]
    fields = {**place.fields, "messages": long}
    response = flaky.break_at(place.name, deed, lambda: flaky.chat(**fields))
    is_left = place.name.startswith("compressor") and deed != "slow"
    expected = flaky.text_of(**{**fields, "compression": not is_left})

    flaky.check_response(response, place, deed, expected)
    assert flaky.chat(**fields).status_code == 200, "the next request"


@pytest.mark.parametrize(("place", "deed"), cells(SURFACE))
def test_surface_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    name = place.name.partition(".")[2]
    is_streamed = name in ("opening", "close")
    # Pieces that wait for a slow one come in one batch; the time limit is that of each.
    body = {"model": "broken", "stream": is_streamed, "max_tokens": 16 if deed == "slow" else 6}

    def ask() -> httpx.Response:
        paths = {"handle": "/flaky", "stream of its reply": "/stream"}
        return flaky.client.get(paths[name]) if name in paths else flaky.client.post("/say", json=body)

    expected = ask().text
    response = flaky.break_at(place.name, deed, ask)

    if deed == "slow":
        assert response.text == expected
    else:
        assert is_streamed or '"plugin_failed"' in response.text, response.text
        assert "he surface 'flaky' of the plugin 'flaky_kit'" in response.text and "a secret" not in response.text
        flaky.check_named(place.name, deed)
    assert ask().text == expected, "the next request"


@pytest.mark.parametrize(("place", "deed"), cells([Place(name="authenticator.authenticate")]))
def test_authenticator_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    def ask() -> httpx.Response:
        return flaky.client.get("/v1/models", headers={"Authorization": "Bearer flaky"})

    response = flaky.break_at(place.name, deed, ask)

    assert response.status_code == (200 if deed == "slow" else 503)
    if deed != "slow":
        assert response.json()["error"]["code"] == "authenticator_failed"
        assert "a secret" not in response.text
        flaky.check_named(place.name, deed, "flaky_kit")
    assert ask().status_code == 200


@pytest.mark.parametrize(("place", "deed"), cells([Place(name="listener.on_event", deeds=("raise", "exit"))]))
def test_listener_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    flaky.break_at(place.name, deed, flaky.chat, lambda: flaky.check_named(place.name, deed, "flaky_kit"))


class Held:
    """An authenticator that answers only when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_asked = threading.Semaphore(0)

    def authenticate(self, credentials: Credentials, options: object) -> Identity | None:
        self.num_asked.release()
        self.may_answer.wait(60)
        return Identity(name="late")


def test_slow_authenticator_never_delays_a_key_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = Held()
    settings = Settings(
        auth=AuthSettings(keys=(KeySettings(name="ours", key="k"),), authenticators=("jwt",), timeout_s=30.0),
        models={"m": ModelSettings(source=str(tmp_path), backend="fake", isolation="thread")},
        plugins=PluginsSettings(),
    )
    registry = PluginRegistry.for_settings(settings)
    monkeypatch.setattr(registry.authenticators["jwt"], "ask", lambda credentials: held.authenticate(credentials, None))
    with served(settings, registry, headers={"Authorization": "Bearer k"}) as client:

        def ask_as_stranger() -> None:
            answers.append(httpx.get(f"{client.base_url}/v1/models", headers={"x-api-key": "?"}, timeout=60))

        answers: list[httpx.Response] = []
        strangers = [threading.Thread(target=ask_as_stranger) for _ in range(80)]
        for stranger in strangers:
            stranger.start()
        for _ in range(8):  # all of its threads are busy
            held.num_asked.acquire()

        assert client.get("/v1/models").status_code == 200

        wait_until(lambda: answers, lambda: "a stranger that is refused because too many wait")
        held.may_answer.set()
        for stranger in strangers:
            stranger.join()
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and {answer.status_code for answer in answers} == {200, 503}
    assert all(answer.json()["error"]["code"] == "authenticator_failed" for answer in refused)
    assert all(answer.headers["retry-after"] for answer in refused)
