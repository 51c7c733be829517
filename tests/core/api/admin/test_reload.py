"""The configuration is read again while the server answers: all of it or nothing, and nobody is cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import attrs
import httpx
import pytest
from attrs import evolve

from enginehouse.api.http.config_snapshots import keep_fixed
from enginehouse.contract.backend import ModelSource, Probe
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.router import Attempt, RouteQuestion, RoutingDecision
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.optimisations import RouterSettings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.scripted import ScriptedBackend, ScriptedOptions
from enginehouse_testkit.served import served
from enginehouse_testkit.server import started_server
from enginehouse_testkit.server_thread import server_thread

from .conftest import PLAIN, Operated

Operate = Callable[..., Operated]


class Stream:
    """A stream that runs beside the test, until :meth:`stop`."""

    def __init__(self, url: str, model: str) -> None:
        self.lines: list[str] = []
        self._is_stopping = False
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, model))
        self._thread.start()
        assert self._began.wait(60)

    def _read(self, url: str, model: str) -> None:
        body = {"model": model, "prompt": "x", "stream": True, "max_tokens": 20_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self._began.set()
                if self._is_stopping:
                    return

    def goes_on(self) -> bool:
        count = len(self.lines)
        deadline = time.monotonic() + 60
        while len(self.lines) <= count + 3:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> list[str]:
        self._is_stopping = True
        self._thread.join(60)
        return self.lines


def test_models_appear_change_and_leave_and_streams_go_on(operate: Operate) -> None:
    server = operate()
    stream = Stream(server.url, "endless")
    changed = PLAIN.replace('source = "plain.json"', 'source = "other.json"').replace("org/fake:tag", "renamed")
    answer = server.reload(changed)

    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "snapshot": 2,
        "models": {
            "added": ["renamed"],
            "removed": ["org/fake:tag"],
            "replaced": ["plain"],
            "updated": [],
            "kept": ["endless"],
        },
        "needs_restart": [],
    }
    assert list(server.models()) == ["plain", "renamed", "endless"]
    assert server.ask("renamed").status_code == 200
    assert server.ask("org/fake:tag").status_code == 404
    deadline = time.monotonic() + 60
    while server.ask("plain").json()["choices"][0]["text"] != "Bye" and time.monotonic() < deadline:
        pass
    assert server.ask("gpt-plain").json()["choices"][0]["text"] == "Bye"
    assert stream.goes_on()
    assert not [line for line in stream.stop() if "error" in line]


def test_defaults_aliases_keys_and_limits_hold_for_the_next_request(operate: Operate) -> None:
    server = operate()
    engine_before = server.models()["plain"]["idle_s"]
    changed = PLAIN.replace('aliases = ["gpt-plain"]', 'aliases = ["new-name"]\ndefaults = {temperature = 0.25}')
    changed = changed.replace("[limits]", "[limits]\nmax_tokens = 7")
    changed += (
        '\n[server]\ndetails = true\n[auth]\nkeys = [{name = "boss", key = "boss", scopes = ["infer", "admin"]}]\n'
    )
    assert server.reload(changed).json()["models"]["updated"] == ["plain"]

    assert server.ask("plain").status_code == 401
    server.client.headers["authorization"] = "Bearer boss"
    answer = server.ask("new-name").json()
    assert answer["enginehouse"]["parameters"]["temperature"] == {"value": 0.25, "origin": "model"}
    assert server.ask("gpt-plain").status_code == 404
    assert server.ask("plain", max_tokens=8).json()["error"]["param"] == "max_tokens"
    assert server.models()["plain"]["idle_s"] < engine_before + 60
    limits = server.client.get("/schema").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert limits["max_tokens"]["maximum"] == 7


@pytest.mark.parametrize(
    ("text", "param", "says"),
    [
        ("[limits]\nmax_tokns = 5", "limits.max_tokns", "did you mean 'max_tokens'?"),
        ("[limits\n", None, "is not valid TOML"),
        ('[models.m]\nsource = "plain.json"\nbackend = "scripted"\nslotz = 5', "models.m.slotz", "'slots'"),
        (
            '[models.m]\nsource = "gone.gguf"',
            "models.m.source",
            "models.m.source: file or folder not found: 'gone.gguf'",
        ),
        (
            '[models.m]\nsource = "fake"\nbackend = "fake"\nadapters = {a = {source = "gone"}}',
            "models.m.adapters.a.source",
            "models.m.adapters.a.source: file or folder not found",
        ),
        (
            '[models.m]\nsource = "plain.json"\nbackend = "scripted"\ndefaults = {temperature = 9}',
            "models.m.defaults.temperature",
            "2",
        ),
        (
            '[models.m]\nsource = "plain.json"\nbackend = "scripted"\nchat_template = "no.jinja"',
            "models.m.chat_template",
            "no.jinja",
        ),
        (
            '[models.m]\nsource = "plain.json"\nbackend = "scripted"\ntool_parser = "none-such"',
            "models.m.tool_parser",
            "none-such",
        ),
        ('[auth]\nkey_file = "no-such-file"', "auth.key_file", "no-such-file"),
    ],
)
def test_wrong_configuration_is_refused_and_the_old_one_stays(
    operate: Operate, text: str, param: str | None, says: str
) -> None:
    server = operate()
    before = server.models()
    refused = server.reload(text)
    error = refused.json()["error"]

    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_configuration", param), error
    assert error["message"].startswith("The configuration was not reloaded; the old one stays in use: ")
    assert says in error["message"]
    assert server.models().keys() == before.keys()
    assert server.ask("gpt-plain").status_code == 200


def test_broken_chat_template_of_a_loaded_model_is_refused(operate: Operate) -> None:
    server = operate()
    assert server.ask("org/fake:tag").status_code == 200
    (server.config.parent / "broken.jinja").write_text("{% for %}")
    text = PLAIN.replace('isolation = "thread"', 'isolation = "thread"\nchat_template = "broken.jinja"')
    refused = server.reload(text)

    assert refused.status_code == 400
    assert "chat template 'chat_template' is broken" in refused.json()["error"]["message"]


def test_settings_that_need_a_restart_are_reported_and_keep_their_old_values(operate: Operate) -> None:
    server = operate()
    text = PLAIN.replace("[limits]", "[limits]\nmax_header_bytes = 2048\nmax_choices = 2").replace(
        'allow = ["samplers"]', "allow = []"
    )
    answer = server.reload(text + '\n[server]\nhost = "localhost"\n').json()

    assert answer["needs_restart"] == ["server.host", "limits.max_header_bytes", "plugins"]
    assert server.ask("plain", n=3).json()["error"]["param"] == "n"
    assert server.client.get("/health", headers={"x-long": "x" * 3000}).status_code == 200


def test_only_settings_of_the_process_are_kept() -> None:
    old = Settings()
    new = Settings(
        server=ServerSettings(port=1, details=True),
        limits=LimitsSettings(max_queue=5, max_stop=5),
        plugins=PluginsSettings(deny=("x",)),
    )
    settings, paths = keep_fixed(old, new)

    assert paths == ("server.port", "limits.max_queue", "plugins")
    assert (settings.server.port, settings.limits.max_queue, settings.plugins) == (8080, 128, PluginsSettings())
    assert (settings.server.details, settings.limits.max_stop) == (True, 5)
    assert keep_fixed(settings, settings) == (settings, ())


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGHUP")
def test_sighup_reloads_and_what_came_of_it_is_in_the_log(tmp_path: Path) -> None:
    def until_logged(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in server.output:
            assert time.monotonic() < deadline, server.output
            time.sleep(0.02)

    write_script(tmp_path / "a.json", ["A"])
    write_script(tmp_path / "b.json", ["B"])
    config = tmp_path / "enginehouse.toml"
    model = '[models.{name}]\nsource = "{name}.json"\nbackend = "scripted"\n'
    config.write_text(model.format(name="a"))
    with started_server("--config", config) as server, httpx.Client(base_url=str(server.url), timeout=20) as client:
        config.write_text(model.format(name="a") + model.format(name="b") + 'aliases = ["claude-*"]\n')
        os.kill(server.process.pid, signal.SIGHUP)
        until_logged("configuration 2 is served now; models added: b")
        deadline = time.monotonic() + 60
        while (answer := client.post("/v1/completions", json={"model": "b", "prompt": "x"})).status_code == 503:
            assert time.monotonic() < deadline, "it is still loading"
            time.sleep(0.02)
        assert answer.json()["choices"][0]["text"] == "B"
        alias = {"model": "claude-fable", "prompt": "x"}
        assert client.post("/v1/completions", json=alias).json()["choices"][0]["text"] == "B"
        config.write_text(model.format(name="a") + 'aliases = ["claude-*"]\n' + model.format(name="b"))
        os.kill(server.process.pid, signal.SIGHUP)
        until_logged("configuration 3 is served now")
        assert client.post("/v1/completions", json=alias).json()["choices"][0]["text"] == "A"
        config.write_text("nonsense")
        os.kill(server.process.pid, signal.SIGHUP)
        until_logged("The configuration was not reloaded; the old one stays in use")

        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a", "b"]


_IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "enginehouse", *sys.argv[1:]])
"""


def test_server_ends_with_its_terminal(tmp_path: Path) -> None:
    config = tmp_path / "enginehouse.toml"
    source = write_script(tmp_path / "a.json", ["A"])
    config.write_text(f'[models.a]\nsource = "{source}"\nbackend = "scripted"\n')
    ours, theirs = pytest.importorskip("pty").openpty()
    command = [sys.executable, "-c", _IN_TERMINAL, "serve", "--port", "0", "--config", str(config)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        written = b""
        while b"a is ready" not in written:
            written += os.read(ours, 65536)
        os.close(ours)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


class _Stumbling:
    """A backend, a model source and a router of one plugin, whose author has forgotten something."""

    name = "stumbling"
    api_version = API_VERSION
    options: type[Any] = ScriptedOptions
    opens: Literal["model", "engine"] = "engine"

    def probe(self) -> Probe:
        raise RuntimeError("forgotten")

    match = estimate = open = probe

    def find(self) -> ModelSource | None:
        raise RuntimeError("forgotten")

    def route(self, question: RouteQuestion) -> RoutingDecision:
        return RoutingDecision(attempts=tuple(Attempt(one.name) for one in question.candidates), reason="any")

    def check_models(self, models: Sequence[str]) -> None:
        raise RuntimeError("forgotten")


@pytest.mark.parametrize(
    ("changed", "culprit"),
    [
        ({"models": {"new": ModelSettings(source="a.json", backend="stumbling")}}, "The backend 'stumbling'"),
        ({"models": {"new": ModelSettings(source="lost")}}, "The model source 'lost'"),
        ({"router": RouterSettings(strategy="stumbling")}, "The router 'stumbling'"),
        (RuntimeError("forgotten"), "RuntimeError"),
    ],
    ids=["backend", "model source", "router", "reading"],
)
def test_plugin_that_stumbles_while_a_change_is_planned_is_named_and_nothing_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any] | Exception,
    culprit: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path / "a.json", ["A"])
    settings = Settings(models={"a": ModelSettings(source="a.json", backend="scripted")})
    registry, plugin = PluginRegistry.for_settings(settings), _Stumbling()
    registry = evolve(
        registry,
        backends={**registry.backends, plugin.name: plugin},
        model_sources={"lost": plugin.find},
        routers={plugin.name: plugin},
    )
    wanted: list[dict[str, Any] | Exception] = [changed]

    def read() -> Settings:
        if isinstance(wanted[0], Exception):
            raise wanted[0]
        return evolve(settings, **{"models": settings.models, **wanted[0]})

    with served(settings, registry, reread=read, timeout=20) as client:
        failed = client.post("/admin/reload", json={})
        answer = client.post("/v1/completions", json={"model": "a", "prompt": "x", "max_tokens": 1})
        wanted[0] = {}
        again = client.post("/admin/reload", json={})
    error = failed.json()["error"]

    assert (failed.status_code, error["code"]) == (500, "reload_failed")
    assert error["message"].startswith("The configuration was not reloaded; the old one stays in use: ")
    assert culprit in error["message"]
    assert ("forgotten" in error["message"]) == isinstance(changed, Exception), "the log shows a plugin's exception"
    assert answer.status_code == 200, answer.text
    assert again.json()["snapshot"] == 2
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["forgotten"]


def test_order_to_load_a_model_whose_backend_stumbles_names_it(tmp_path: Path) -> None:
    source = write_script(tmp_path / "a.json", ["A"])
    stumbling = ModelSettings(source=source, backend="stumbling", load="lazy")
    settings = Settings(models={"a": ModelSettings(source=source, backend="scripted"), "b": stumbling})
    registry = PluginRegistry.for_settings(settings)
    registry = evolve(registry, backends={**registry.backends, "stumbling": _Stumbling()})
    with served(settings, registry, timeout=20) as client:
        failed = client.post("/admin/models/b/load", json={})
        shown = client.get("/admin/models").json()["data"]
    said = "The backend 'stumbling' of the plugin 'admin.test_reload' failed in probe."

    assert failed.status_code == 500
    assert said in failed.json()["error"]["message"]
    assert [model["error"] for model in shown] == [None, said]


@attrs.define(eq=False)
class _Stuck(ScriptedBackend):
    """Waits for something while a model is planned, once ``is_stuck`` says so."""

    is_stuck: bool = False
    is_asked: threading.Event = attrs.field(factory=threading.Event)
    may_go_on: threading.Event = attrs.field(factory=threading.Event)

    def wait(self) -> None:
        self.is_asked.set()
        assert self.may_go_on.wait(60)

    def probe(self) -> Probe:
        if self.is_stuck:
            self.wait()
        return super().probe()


@pytest.mark.parametrize("where", ["reading", "planning"])
def test_reload_that_never_ends_does_not_hold_up_the_end_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    model = ModelSettings(source=write_script(tmp_path / "a.json", ["A"]), backend="scripted")
    settings = Settings(models={"a": model}, server=ServerSettings(shutdown_s=1.0))
    backend = _Stuck()
    registry = evolve(PluginRegistry.for_settings(settings), backends={"scripted": backend})

    def read() -> Settings:
        if where == "reading":
            backend.wait()
        return evolve(settings, models={"a": model, "b": model})

    with server_thread(settings, registry, read) as running, ThreadPoolExecutor() as threads:
        while httpx.get(f"{running.url}/health", timeout=60).status_code != 200:
            pass
        backend.is_stuck = where == "planning"
        asked = threads.submit(httpx.post, f"{running.url}/admin/reload", json={}, timeout=60)
        assert backend.is_asked.wait(60)
        body = {"model": "a", "prompt": "x", "max_tokens": 1}
        meanwhile = httpx.post(f"{running.url}/v1/completions", json=body, timeout=20)
        try:
            running.stop()
        finally:
            backend.may_go_on.set()
        answer = asked.result(60)

    assert meanwhile.status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert running.exit_code == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_start_that_never_ends_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    model = ModelSettings(source=write_script(tmp_path / "a.json", ["A"]), backend="scripted")
    settings = Settings(models={"a": model}, server=ServerSettings(shutdown_s=1.0))
    backend = _Stuck(is_stuck=True)
    registry = evolve(PluginRegistry.for_settings(settings), backends={"scripted": backend})
    with server_thread(settings, registry) as running:
        assert backend.is_asked.wait(60)
        try:
            running.stop()
        finally:
            backend.may_go_on.set()

    assert running.exit_code == 0


def test_server_without_a_configuration_says_so(tmp_path: Path) -> None:
    source = write_script(tmp_path / "a.json", ["A"])
    with server_thread(Settings(models={"a": ModelSettings(source=source, backend="scripted")})) as running:
        refused = httpx.post(f"{running.url}/admin/reload", json={}, timeout=20)

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_configuration")
