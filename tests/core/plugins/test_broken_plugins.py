"""A plugin that breaks at a chosen place, in a running server: its author and the client learn who it was, others work.

One installed plugin registers an object of several kinds, each of which does what the request says: raises, exits,
gives a wrong type, hangs or ends the process.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

FLAKY = """
import os, sys, time
import enginehouse
from attrs import frozen
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.parsers import AnswerText, PreparedChat
from enginehouse.contract.router import Attempt, RoutingDecision
from enginehouse.contract.types import Constraint

@frozen
class Fields:
    flaky: str = ""

def act(deed):
    if deed == "raise":
        raise KeyError("a secret of the plugin")
    if deed == "exit":
        sys.exit(3)
    if deed == "refuse":
        raise InvalidRequest("flaky: at most 3 words", "flaky")
    if deed == "end":
        os._exit(7)
    if deed == "hang":
        time.sleep(3600)
    return "a string" if deed == "type" else None

class Processor:
    name, api_version, request_fields = "flaky", 1, Fields
    def create(self, fields):
        place, _, deed = fields.flaky.partition(":")
        if place == "create":
            return act(deed)
        return Session(deed) if place == "process" else None

class Session:
    def __init__(self, deed):
        self.deed = deed
    def process(self, logits, history):
        if act(self.deed):
            logits[:] = float("nan")

class Router:
    name, api_version = "flaky", 1
    def route(self, question):
        text = question.request.messages[-1].content
        return act(text) or RoutingDecision(attempts=(Attempt("calm"),), reason="calm")

class Parser:
    name, api_version = "flaky", 1
    def match(self, model):
        return "surely"  # wrong for every model; the setting names it for one
    def bind(self, model):
        return Format()

class Format:
    markers = ()
    def prepare(self, messages, tools):
        place, _, deed = tools[0].name.partition("_") if tools else ("", "", "")
        return (act(deed) if place == "prepare" else None) or PreparedChat(messages)
    def constraint(self, tools, parallel, answer=None):
        return Constraint("json_schema", "{}", "tools")
    def open(self, tools):
        place, _, deed = tools[0].name.partition("_")
        act(deed if place == "open" else "")
        return Text(place, deed)

class Text:
    def __init__(self, place, deed):
        self.place, self.deed = place, deed
    def push(self, text):
        return (act(self.deed) if self.place == "push" else None) or [AnswerText(text)]
    def flush(self, is_cut):
        return (act(self.deed) if self.place == "flush" else None) or []

@enginehouse.hookimpl
def register_logits_processors(register):
    register(Processor())

@enginehouse.hookimpl
def register_routers(register):
    register(Router())

@enginehouse.hookimpl
def register_tool_parsers(register):
    register(Parser())
"""

CONFIG = """
[router]
strategy = "flaky"
default = "calm"
[models.broken]
source = "."
backend = "fake"
tool_parser = "flaky"
step_timeout_s = 2.0
[models.calm]
source = "."
backend = "fake"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("flaky")
    (folder / "flaky_plugin.py").write_text(FLAKY)
    info = folder / "flaky_kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flaky-kit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nflaky_kit = flaky_plugin\n")
    (folder / "config.toml").write_text(CONFIG)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with started_server("--config", folder / "config.toml", env={**os.environ, "PYTHONPATH": path}) as running:
        yield running


def chat(server: ServerProcess, model: str, text: str = "Hello", **fields: Any) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 6,
        "temperature": 0,
        **fields,
    }
    headers = {"X-Enginehouse-Details": "true"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)


def tool(name: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]


def check_others(server: ServerProcess) -> None:
    """Another model answers, and the server lives."""
    assert server.process.poll() is None, server.output
    assert chat(server, "calm").status_code == 200


def check_log(server: ServerProcess, kind: str, *, has_traceback: bool) -> None:
    """The log names plugin and kind, and the file and line of the plugin."""
    told = re.search(rf"the {kind} 'flaky' of the plugin 'flaky_kit'", server.output)
    assert told, server.output
    if has_traceback:
        assert re.search(r"flaky_plugin\.py[\"']?[,:]( line )?\d+", server.output[told.start() :]), server.output


FAILURES = [
    ("logits processor", {"flaky": "create:raise"}, "create"),
    ("logits processor", {"flaky": "create:exit"}, "create"),
    ("logits processor", {"flaky": "create:type"}, "create"),
    ("logits processor", {"flaky": "process:raise"}, "process"),
    ("logits processor", {"flaky": "process:exit"}, "process"),
    ("logits processor", {"flaky": "process:type"}, "process"),
    ("tool parser", {"tools": tool("prepare_raise")}, "prepare"),
    ("tool parser", {"tools": tool("prepare_exit")}, "prepare"),
    ("tool parser", {"tools": tool("prepare_type")}, "prepare"),
]


@pytest.mark.parametrize(("kind", "fields", "place"), FAILURES, ids=str)
def test_client_and_author_learn_which_plugin_failed(
    server: ServerProcess, kind: str, fields: dict[str, Any], place: str
) -> None:
    error = chat(server, "broken", **fields).json()["error"]

    assert error["code"] == "plugin_failed"
    assert f"The {kind} 'flaky' of the plugin 'flaky_kit'" in error["message"] and place in error["message"]
    assert "secret" not in error["message"]
    check_log(server, kind, has_traceback=True)
    check_others(server)


@pytest.mark.parametrize("place", ["open", "push", "flush"])
@pytest.mark.parametrize("deed", ["raise", "exit", "type"])
def test_answer_of_a_failing_tool_parser_is_text(server: ServerProcess, place: str, deed: str) -> None:
    answer = chat(server, "broken", tools=tool(f"{place}_{deed}")).json()

    assert answer["choices"][0]["message"]["content"] == chat(server, "calm").json()["choices"][0]["message"]["content"]
    check_log(server, "tool parser", has_traceback=True)


@pytest.mark.parametrize("deed", ["raise", "exit", "type"])
def test_default_model_answers_when_the_router_fails(server: ServerProcess, deed: str) -> None:
    answer = chat(server, "auto", deed)

    assert answer.status_code == 200
    assert "the router failed" in answer.json()["enginehouse"]["routed"]["reason"]
    assert "secret" not in answer.text
    check_log(server, "router", has_traceback=True)


def test_request_that_a_plugin_refuses_is_the_clients_mistake(server: ServerProcess) -> None:
    answer = chat(server, "broken", flaky="create:refuse")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "flaky" and "at most 3 words" in answer.json()["error"]["message"]


@pytest.mark.parametrize("deed", ["end", "hang"])
def test_plugin_that_ends_or_stops_the_worker_is_named_and_the_request_not_blamed(
    server: ServerProcess, deed: str
) -> None:
    for _ in range(2):  # a request that was blamed would be refused at once, with another code
        error = chat(server, "broken", f"for {deed}", flaky=f"process:{deed}").json()["error"]

        assert error["code"] == "plugin_failed", error
        assert "The logits processor 'flaky' of the plugin 'flaky_kit'" in error["message"]
    assert chat(server, "broken", f"for {deed}").status_code == 200
    check_others(server)
    assert "in process of the logits processor 'flaky' of the plugin 'flaky_kit'" in server.output
    if deed == "hang":
        assert re.search(r'flaky_plugin\.py", line \d+ in act', server.output), "the log shows where it hangs"


def test_failures_are_counted_in_server_and_workers(server: ServerProcess) -> None:
    chat(server, "broken", flaky="process:raise")
    chat(server, "auto", "raise")
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text

    for kind in ("logits processor", "router", "tool parser"):
        assert f'enginehouse_plugin_failures_total{{kind="{kind}",plugin="flaky_kit"}}' in metrics, metrics


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
