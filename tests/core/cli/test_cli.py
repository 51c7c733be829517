"""The command line: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from enginehouse.cli import main
from enginehouse.cli.output import Startup
from enginehouse.cli.serve import choose_models
from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.plugins import PluginRecord, PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse_testkit.server import started_server
from enginehouse_testkit.waiting import wait_until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test runs in an empty folder, without settings in the environment."""
    for name in [name for name in os.environ if name.startswith("ENGINEHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def write_script(folder: Path, *texts: str, **more: Any) -> Path:
    file = folder / "script.json"
    file.write_text(json.dumps({"tokens": [{"text": text} for text in texts], **more}))
    return file


def test_version() -> None:
    assert run("--version").output.startswith("enginehouse, version 0.")


def test_help_lists_the_commands() -> None:
    output = run("--help").output

    assert all(f"\n  {command} " in output for command in ("models", "plugins", "serve"))


def test_unknown_command_is_misuse() -> None:
    result = run("srve")

    assert result.exit_code == 2
    assert "No such command 'srve'" in result.output


def test_a_command_of_an_excluded_plugin_says_why(folder: Path) -> None:
    (folder / "enginehouse.toml").write_text("[plugins]\ndeny = ['doctor']")
    result = run("doctor")

    assert result.exit_code == 2
    assert "unknown command 'doctor': the plugin 'doctor' is installed, but plugins.deny names it" in result.output


def test_plugins_lists_what_each_plugin_brings() -> None:
    output = run("plugins").output

    assert all(column in output for column in ("Distribution", "Brings", "Time"))
    assert "backend llamacpp" in output
    assert "register_backends" not in output
    assert "llamacpp (enginehouse): hooks register_backends" in run("plugins", "-v").output


def test_plugins_as_json() -> None:
    records = {record["name"]: record for record in json.loads(run("plugins", "--json").output)}

    assert set(records["samplers"]) == {attribute.name for attribute in attrs.fields(PluginRecord)}
    assert records["samplers"]["distribution"] == "enginehouse"
    assert "sampler typical_p" in records["samplers"]["brings"]


def test_plugins_show_what_the_settings_exclude(folder: Path) -> None:
    (folder / "enginehouse.toml").write_text("[plugins]\ndeny = ['samplers', 'nothere']")
    result = run("plugins")

    assert result.exit_code == 0
    assert "samplers (enginehouse): not loaded, plugins.deny names it" in result.output.splitlines()
    assert "plugins.deny: the plugin 'nothere' is not installed" in result.output.splitlines()


def test_plugins_are_listed_in_spite_of_wrong_settings(folder: Path) -> None:
    """The table comes first, then what prevents a start."""
    (folder / "enginehouse.toml").write_text("[plugins]\ndeny = ['jwt']\n[plugins.bans]\nx = 1\n")
    lines = run("plugins").output.splitlines()
    assert lines[0].split()[:2] == ["Name", "Distribution"]
    assert "bans (enginehouse): plugins.bans: this plugin has no options" in lines
    (folder / "enginehouse.toml").write_text("[plugins]\ndeny = ['jwt']\n[auth]\nauthenticators = ['jwt']\n")
    result = run("plugins", "--json")

    assert result.exit_code == 2
    assert {record["name"] for record in json.loads(result.stdout)} >= {"jwt", "samplers"}
    assert "unknown authenticator 'jwt': the plugin 'jwt' is installed, but plugins.deny names it" in result.stderr


def test_plugins_new_writes_a_plugin_with_its_own_name(folder: Path) -> None:
    run("plugins", "new", "my_engine")
    written = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*") if path.is_file()}

    assert "enginehouse-my-engine/enginehouse_my_engine/backend.py" in written
    assert "class MyEngineBackend:" in written["enginehouse-my-engine/enginehouse_my_engine/backend.py"]
    assert 'my_engine = "enginehouse_my_engine"' in written["enginehouse-my-engine/pyproject.toml"]
    assert not [name for name, text in written.items() if "inimal" in name + text]


def test_plugins_new_refuses_the_name_of_an_installed_plugin(folder: Path) -> None:
    result = run("plugins", "new", "samplers")

    assert result.exit_code == 2
    assert "samplers: the name is taken by the plugin of enginehouse" in " ".join(result.output.split())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["My_Engine", "1st", "a-b", "a__b", "../a", ""])
def test_plugins_new_takes_names_of_packages_only(folder: Path, name: str) -> None:
    result = run("plugins", "new", name)

    assert result.exit_code == 2
    assert "NAME" in result.output
    assert list(folder.iterdir()) == []


def test_plugins_new_overwrites_nothing(folder: Path) -> None:
    result = run("plugins", "new", "mine", "--folder", str(folder))

    assert result.exit_code == 2
    assert "exists already" in result.output


def test_plugins_check_runs_the_suites_of_what_a_plugin_registers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "enginehouse", "plugins", "check", "bans"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["samplerz"], "did you mean 'samplers'"),
        (["samplers", "-o", "context"], "is not KEY=VALUE"),
    ],
)
def test_plugins_check_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = run("plugins", "check", *arguments)

    assert result.exit_code == 2
    assert message in result.output


def test_models_lists_configured_ones_with_backend_and_reason(folder: Path) -> None:
    script = write_script(folder, "hi")
    (folder / "enginehouse.toml").write_text(
        f"[models.demo]\nsource = '{script.name}'\nbackend = 'scripted'\n[models.lost]\nsource = 'no.gguf'"
    )

    rows = {row["name"]: row for row in json.loads(run("models", "--json").output)}

    assert rows["demo"]["backend"] == "scripted"
    assert rows["demo"]["configured"] is True
    assert rows["demo"]["path"] == str(script)
    assert rows["demo"]["reason"]
    assert rows["lost"]["backend"] is None
    assert "no.gguf" in rows["lost"]["error"]
    assert "no.gguf" in run("models").output


def test_models_lists_what_plugins_offer() -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json").output)}

    assert rows["starter"]["configured"] is False


@pytest.mark.parametrize("command", ["serve", "models", "plugins"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", "server.prot: unknown setting (did you mean 'port'?)"),
        ("[server]\nhost = '0.0.0.0'", "--insecure"),
        ("[server", "not valid TOML"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(folder: Path, command: str, text: str, words: str) -> None:
    (folder / "enginehouse.toml").write_text(text)

    result = run(command)

    assert result.exit_code == 2
    assert words in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model.gguf"], "file or folder not found: 'no-such-model.gguf'"),
        (["--host", "0.0.0.0"], "auth.keys"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--port", "99999"], "0<=x<=65535"),
    ],
)
def test_serve_refuses_before_it_starts(arguments: list[str], words: str) -> None:
    result = run("serve", *arguments)

    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_serve_without_any_model_says_what_to_do(folder: Path) -> None:
    (folder / "enginehouse.toml").write_text("[plugins]\ndeny = ['starter']")

    result = run("serve")

    assert result.exit_code == 2
    assert "pip install 'enginehouse[llamacpp,starter]'" in result.output


def test_serve_reports_a_taken_port(folder: Path) -> None:
    script = write_script(folder, "hi")
    with started_server(script, "--backend", "scripted") as server:
        assert server.url
        result = run("serve", str(script), "--backend", "scripted", "--port", server.url.rpartition(":")[2])

    assert result.exit_code == 2
    assert result.output.count("server.port") == 1
    assert "Address already in use; choose another port" in result.output


def test_serve_exits_with_1_when_no_model_loads(folder: Path) -> None:
    (folder / "broken.json").write_text("[]")

    with (
        pytest.raises(RuntimeError, match="model broken failed"),
        started_server(folder / "broken.json", "--backend", "scripted") as server,
    ):
        raise AssertionError(f"it serves: {server.output}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_announces_itself_answers_and_stops(folder: Path, number: signal.Signals) -> None:
    script = write_script(folder, "Hel", "lo")
    with started_server(script, "--backend", "scripted") as server:
        question = {"model": "script", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=60).json()
        server.process.send_signal(number)
        exit_code = server.process.wait(60)

    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert exit_code == 0
    assert f"script is ready at {server.url}/v1" in server.output
    assert "curl" not in server.output  # that example is for people, at a terminal
    assert "Traceback" not in server.output


def test_serve_reads_the_configured_models(folder: Path) -> None:
    script = write_script(folder, "x")
    (folder / "house.toml").write_text(
        f"[models.one]\nsource = '{script.name}'\nbackend = 'scripted'\n"
        f"[models.two]\nsource = '{script.name}'\nbackend = 'scripted'\naliases = ['zwei']"
    )

    with started_server("--config", folder / "house.toml") as server:
        every = httpx.get(f"{server.url}/v1/models", timeout=60).json()
    with started_server("--config", folder / "house.toml", "zwei") as server:
        one = httpx.get(f"{server.url}/v1/models", timeout=60).json()

    assert {"one", "two"} <= {model["id"] for model in every["data"]}
    assert "one" not in {model["id"] for model in one["data"]}
    assert "two" in {model["id"] for model in one["data"]}


def registry(**sources: Callable[[], ModelSource | None]) -> PluginRegistry:
    """The installed plugins and the fake backend, but with these model sources."""
    return evolve(PluginRegistry.load(PluginsSettings(), builtin=["fake"]), model_sources=sources)


def test_choose_models_names_files_and_folders(folder: Path) -> None:
    (folder / "small-1.5.Q4_1.gguf").touch()
    (folder / "Small-1.5").mkdir()

    chosen = choose_models(["small-1.5.Q4_1.gguf", "Small-1.5"], "fake", {}, registry())

    assert chosen == {
        "small-1.5.Q4_1": ModelSettings(source="small-1.5.Q4_1.gguf", backend="fake"),
        "Small-1.5": ModelSettings(source="Small-1.5", backend="fake"),
    }


def test_choose_models_names_links_as_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the files that they lead to, which in the hub's cache are named by their digests."""
    blob = folder / "blobs" / ("9fa5" * 16)
    snapshot = folder / "snapshots" / "0123abc"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    (snapshot / "tiny.Q4_1.gguf").symlink_to("../../blobs/" + blob.name)
    (snapshot / "tiny.Q8_0.gguf").symlink_to(snapshot / "tiny.Q4_1.gguf")
    (folder / "mine-2.5").symlink_to(blob)
    (folder / "Tiny-1.5").mkdir()
    (folder / "Tiny-1.5" / "config.json").write_text("{}")
    (folder / "latest").symlink_to("Tiny-1.5")

    def names(*arguments: str) -> list[str]:
        return list(choose_models(arguments, "fake", {}, registry()))

    both = ["snapshots/0123abc/tiny.Q4_1.gguf", str(snapshot / "tiny.Q8_0.gguf")]
    assert names(*both) == ["tiny.Q4_1", "tiny.Q8_0"]
    assert names("snapshots/../snapshots/0123abc:Q8_0", "./mine-2.5") == ["tiny.Q8_0", "mine-2.5"]
    assert names("latest", "Tiny-1.5/") == ["latest", "Tiny-1.5"]
    assert names("./latest/") == ["latest"]
    monkeypatch.chdir(folder / "Tiny-1.5")
    assert names(".") == names("./") == ["Tiny-1.5"]
    monkeypatch.chdir(snapshot)
    (folder / "snapshots" / "config.json").write_text("{}")
    assert names("..") == ["snapshots"]


def test_choose_models_prefers_configured_names_then_offered_ones(folder: Path) -> None:
    configured = {"mine": ModelSettings(source="x", slots=2, aliases=("other",))}
    offers = registry(offered=lambda: ModelSource("offered", Path()))

    assert choose_models(["other", "offered"], "fake", configured, offers) == {
        "mine": evolve(configured["mine"], backend="fake"),
        "offered": ModelSettings(source="offered", backend="fake"),
    }


def test_choose_models_without_arguments() -> None:
    configured = {"mine": ModelSettings(source="x")}
    starter = registry(starter=lambda: ModelSource("starter", Path()))

    assert choose_models([], None, configured, starter) == configured
    assert choose_models([], "fake", configured, starter)["mine"].backend == "fake"
    assert choose_models([], "fake", {}, starter) == {"starter": ModelSettings(source="starter", backend="fake")}
    with pytest.raises(ConfigError, match="no model to serve"):
        choose_models([], None, {}, registry(starter=lambda: None))


def test_choose_models_without_arguments_takes_every_starter_model_that_the_backend_opens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one for chat is the first, which requests that name none get."""
    sources: dict[str, Callable[[], ModelSource | None]] = {
        "starter-embeddings": lambda: ModelSource("fake-pooler"),
        "starter": lambda: ModelSource("fake"),
        "starter-missing": lambda: None,
        "other": lambda: ModelSource("fake"),
    }
    loaded = PluginRegistry.load(PluginsSettings(), builtin=["fake", "fake-pooler"])
    offers = evolve(loaded, model_sources=sources)

    assert list(choose_models([], None, {}, offers)) == ["starter", "starter-embeddings"]
    assert list(choose_models([], "fake-pooler", {}, offers)) == ["starter-embeddings"]
    assert list(choose_models([], "fake", {}, offers)) == ["starter"]
    offers = evolve(offers, model_sources={**sources, "starter-embeddings": lambda: ModelSource("of no backend")})
    caplog.clear()
    assert list(choose_models([], None, {}, offers)) == ["starter"]
    assert "starter-embeddings is installed but not served: no backend can open" in caplog.text


def test_choose_models_refuses_one_name_for_two(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "model.gguf").touch()

    with pytest.raises(ConfigError, match="'model'"):
        choose_models(["a/model.gguf", "b/model.gguf"], None, {}, registry())


def test_choose_models_refuses_what_no_backend_opens(folder: Path) -> None:
    (folder / "notes.txt").touch()

    with pytest.raises(ModelLoadError, match=r"notes\.txt"):
        choose_models(["notes.txt"], None, {}, registry())
    with pytest.raises(ModelLoadError, match="unknown backend 'none'"):
        choose_models(["notes.txt"], "none", {}, registry())
    with pytest.raises(ModelLoadError, match="file or folder not found"):
        choose_models(["missing.gguf"], None, {}, registry())


def test_startup_shows_progress_and_then_the_example() -> None:
    from rich.console import Console

    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    with Startup(console, ["it's", "other"], has_page=True) as startup:
        startup.on_listening("http://127.0.0.1:1")
        startup.on_progress("it's", 0.4, "reading weights")
        wait_until(lambda: "reading weights" in console.export_text(clear=False))
        startup.on_progress("it's", 1.0, "ready")
        startup.on_progress("it's", 1.0, "ready")  # a restart, much later
        startup.on_progress("other", 1.0, "ready")
        text = console.export_text()

    assert text.count("it's is ready at http://127.0.0.1:1/v1") == 1
    assert text.count("Or open http://127.0.0.1:1/ in a browser.") == 1
    assert "/v1/chat/completions" in text
    assert """'{"model": "it'"'"'s\"""" in text


@pytest.mark.parametrize(("task", "address"), [("embed", "embeddings"), ("rerank", "rerank"), ("classify", "classify")])
def test_startup_shows_an_example_of_the_task(task: str, address: str) -> None:
    from rich.console import Console

    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    with Startup(console, ["m"]) as startup:
        startup.on_listening("http://127.0.0.1:1")
        startup.on_progress("m", 1.0, f"ready for {task}")

    assert f"http://127.0.0.1:1/v1/{address} -H" in console.export_text()
