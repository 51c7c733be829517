"""A plugin that is excluded, or has an error, is distinguished from one that is not installed, in every message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from enginehouse.api.http.app import build_app
from enginehouse.contract.errors import EnginehouseError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, RouterSettings, ServerSettings, Settings
from enginehouse.settings.optimisations import DrafterSettings, ExitPolicySettings
from enginehouse_testkit.application import make_state
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

HEADER = "from enginehouse import hookimpl\n@hookimpl\ndef register_backends(register):\n    "
DENIED = "the plugin {0!r} is installed, but plugins.deny names it"
PLUGINS = PluginsSettings(deny=("banlist", "samplers", "router", "jwt"))


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two third-party plugins: ``banlist``, which the settings deny, and ``broken``."""
    site = tmp_path_factory.mktemp("site")
    for name, code in (("banlist", "1 / 0"), ("broken", HEADER + "raise KeyError('weights')\n")):
        (site / f"absent_{name}.py").write_text(code)
        info = site / f"absent_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: absent-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[enginehouse]\n{name} = absent_{name}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site


@pytest.fixture(scope="module")
def client(site: Path) -> Iterator[httpx.Client]:
    """A server whose settings deny some plugins."""
    script = write_script(site / "script.json", ["Hello"], loop=True)
    models = {"m": ModelSettings(source=str(script), backend="scripted")}
    with served(Settings(models=models, plugins=PLUGINS)) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"banlist": ["x"]}, "banlist: " + DENIED.format("banlist")),
        ({"broken": 1}, "broken: the plugin 'broken' has an error; `enginehouse plugins` shows it"),
        ({"typical_p": 0.5}, "typical_p: " + DENIED.format("samplers")),
        ({"samplers": ["banlist"]}, "samplers: unknown step 'banlist': " + DENIED.format("banlist")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_request_field_of_an_absent_plugin_is_refused(client: httpx.Client, fields: dict, message: str) -> None:
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "x", **fields})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    assert answer.json()["error"]["param"] == next(iter(fields))


def test_a_field_of_an_absent_plugin_that_is_null_is_accepted(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={"model": "m", "prompt": "x", "banlist": None}).status_code == 200


def test_a_field_that_means_nothing_is_listed_as_ignored(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "x", "nothere": 1})

    assert (answer.status_code, answer.headers["x-enginehouse-ignored"]) == (200, "nothere")


MODEL = {"source": "fake", "backend": "fake"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"auth": AuthSettings(authenticators=("jwt",))},
            "auth.authenticators: unknown authenticator 'jwt': " + DENIED.format("jwt"),
        ),
        (
            {"auth": AuthSettings(authenticators=("parsers",))},
            "auth.authenticators: unknown authenticator 'parsers': the plugin 'parsers' brings tool parser harmony",
        ),
        (
            {"models": {"m": ModelSettings(**MODEL)}, "router": RouterSettings(strategy="router")},
            "router.strategy: unknown router 'router': " + DENIED.format("router"),
        ),
        (
            {"models": {"m": ModelSettings(**MODEL, tool_parser="broken")}},
            "models.m.tool_parser: unknown tool parser 'broken': the plugin 'broken' has an error: KeyError: ",
        ),
        (
            {"models": {"m": ModelSettings(**MODEL, defaults={"banlist": ["x"]})}},
            "models.m.defaults.banlist: no such request field: " + DENIED.format("banlist"),
        ),
        (
            {"server": ServerSettings(surfaces=("banlist",))},
            "server.surfaces: unknown surface 'banlist': " + DENIED.format("banlist"),
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_that_names_an_absent_plugin_says_why(settings: dict, message: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        build_app(make_state(Settings(plugins=PLUGINS, **settings)))

    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"backend": "banlist"}, "unknown backend 'banlist': " + DENIED.format("banlist")),
        ({"backend": "nothere"}, "unknown backend 'nothere'; plugins that are excluded or have errors: "),
        (
            {"backend": "fake", "drafters": (DrafterSettings(name="banlist"),)},
            "models.m.drafters[0]: unknown drafter 'banlist': " + DENIED.format("banlist"),
        ),
        (
            {"backend": "fake", "exit_policy": ExitPolicySettings(name="broken")},
            "models.m.exit_policy: unknown exit policy 'broken': the plugin 'broken' has an error: KeyError: ",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_needs_an_absent_plugin_says_why(model: dict, message: str) -> None:
    settings = ModelSettings(source="fake", **model)
    registry = PluginRegistry.load(PLUGINS, builtin=["fake"])
    with pytest.raises(EnginehouseError) as caught:
        plan_model("m", settings, registry)

    assert caught.value.message.startswith(message)


def test_settings_errors_begin_with_their_path() -> None:
    """Also those of plugins that give the path only as an argument."""
    with pytest.raises(EnginehouseError) as caught:
        Settings(models={"m": ModelSettings(source="x", pin=True, ttl=3.0)})

    assert caught.value.message == "models.m.ttl: a pinned model is never unloaded; remove pin or ttl"
    assert json.loads(json.dumps(caught.value.to_fields()))["path"] == "models.m.ttl"
