"""Events for plugins: what they hear, and that nobody waits for them, whatever they do."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import evolve

import enginehouse
from enginehouse.api.http.listeners import Listeners
from enginehouse.contract.server_events import ModelChanged, RequestEnded, ServerStarted, ServerStopped
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.loader import PluginLoader
from enginehouse.plugins.registration import PluginRecord
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2}


class Recording:
    """A plugin that keeps what it hears."""

    def __init__(self, answer: object = None) -> None:
        self.events: list[object] = []
        self.threads: set[int] = set()
        self.answer = answer

    @enginehouse.hookimpl
    def on_event(self, event):
        self.events.append(event)
        self.threads.add(threading.get_ident())
        return self.answer


def registry_with(settings: Settings, plugin: object, options: object = None) -> PluginRegistry:
    """The registry of a server in which ``plugin`` is installed."""
    loader = PluginLoader(settings.plugins)
    record = PluginRecord(name="mine", distribution="mine", version="1", hooks=())
    loader.records.by_name["mine"] = record
    loader._add(plugin, record)
    loader.collect()
    assert loader.records.by_name["mine"].problem is None
    return evolve(PluginRegistry.for_settings(settings), listeners=loader.registration.objects["listeners"])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    source = write_script(tmp_path / "hello.json", ["Hel", "lo"])
    return Settings(models={"m": ModelSettings(source=source, backend="scripted")}, plugins=PluginsSettings(allow=()))


def serve(settings: Settings, plugin: object) -> Iterator[httpx.Client]:
    registry = registry_with(settings, plugin)
    with served(settings, registry, timeout=20) as client:
        yield client


def wait_for_text(client: httpx.Client, text: str) -> None:
    wait_until(lambda: text in client.get("/metrics").text)


def test_hook_on_event(settings: Settings) -> None:
    plugin = Recording()
    for client in serve(settings, plugin):
        headers = {"x-request-id": "mine", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
        answer = client.post("/v1/chat/completions", json=CHAT | {"temperature": 0.5}, headers=headers)
        refused = client.post("/v1/chat/completions", json=CHAT | {"model": "none"})
    events = plugin.events
    answered, failed = (e for e in events if isinstance(e, RequestEnded) and e.endpoint == "/chat/completions")

    assert isinstance(events[0], ServerStarted) and events[0].version
    assert isinstance(events[-1], ServerStopped)
    assert ModelChanged(model="m", kind="ready") in [evolve(e, text="") for e in events if isinstance(e, ModelChanged)]
    assert (answered.request_id, answered.answer_id) == ("mine", answer.json()["id"])
    assert (answered.model, answered.status, answered.usage["completion_tokens"]) == ("m", 200, 2)
    assert answered.traceparent == headers["traceparent"]
    assert answered.parameters["temperature"] == 0.5 and answered.finish_reasons == ("length",)
    assert abs(answered.began_ns / 1e9 - time.time()) < 60 and answered.total_s > 0
    assert (failed.outcome, failed.status, failed.asked_model) == ("model_not_found", 404, "none")
    assert refused.status_code == 404
    assert "a secret" not in repr(events) and "Hello" not in repr(events)
    assert len(plugin.threads) == 1, "a thread of its own"


def test_options_reach_the_hook(settings: Settings) -> None:
    heard: list[object] = []

    class Plugin:
        @enginehouse.hookimpl
        def on_event(self, event, options):
            heard.append(options)

    registry = registry_with(settings, Plugin())
    registry.listeners["mine"](event=ServerStarted(version="1"))

    assert heard == [None]


def test_false_for_the_first_event_ends_it(settings: Settings) -> None:
    plugin = Recording(answer=False)
    for client in serve(settings, plugin):
        client.post("/v1/chat/completions", json=CHAT)

    assert [type(event) for event in plugin.events] == [ServerStarted]


def test_failures_are_counted_and_requests_do_not_notice(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        @enginehouse.hookimpl
        def on_event(self, event):
            raise RuntimeError("no collector today")

    with caplog.at_level(logging.ERROR, "enginehouse.server"):
        for client in serve(settings, Failing()):
            for _ in range(3):
                assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            wait_for_text(client, 'dropped_events_total{plugin="mine",reason="failed"}')

    told = [record for record in caplog.records if "failed in on_event" in record.getMessage()]
    assert len(told) == 1, "once a minute is enough"


def test_a_plugin_that_hangs_delays_nobody_and_not_the_end(settings: Settings) -> None:
    release = threading.Event()

    class Hanging:
        @enginehouse.hookimpl
        def on_event(self, event):
            release.wait(60)

    began = time.monotonic()
    for client in serve(settings, Hanging()):
        for _ in range(5):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    took = time.monotonic() - began
    release.set()

    assert took < 30


def test_events_that_come_too_fast_are_dropped_but_never_the_last() -> None:
    begun, release, heard = threading.Event(), threading.Event(), []

    def slow(event: object) -> None:
        begun.set()
        release.wait(60)
        heard.append(event)

    listeners = Listeners({"slow": slow}, max_waiting=3)
    listeners.start("1")
    assert begun.wait(60)
    for n in range(10):
        listeners.publish(ModelChanged(model="m", kind=str(n)))
    assert listeners.dropped["slow", "queue_full"] == 7
    closing = threading.Thread(target=listeners.close)
    closing.start()
    wait_until(lambda: listeners.dropped["slow", "queue_full"] == 8)
    release.set()
    closing.join(60)

    assert isinstance(heard[-1], ServerStopped), "one made room for the end"
    assert listeners.dropped["slow", "queue_full"] == 8


def test_without_plugins_nothing_is_made() -> None:
    assert not Listeners()
