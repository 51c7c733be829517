"""Settings: sources and their order, strictness, messages that name the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from attrs.validators import ge

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import ModelSettings, Settings, is_loopback, load_settings, structure_options


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None, **overrides: dict[str, Any]) -> Settings:
    file = tmp_path / "enginehouse.toml"
    file.write_text(text)
    return load_settings(file, env or {}, overrides)


def test_load_settings_without_sources_gives_defaults() -> None:
    assert load_settings(None, {}) == Settings()


def test_load_settings_overrides_file_by_environment_by_command_line(tmp_path: Path) -> None:
    text = "[server]\nport = 1\nshutdown_s = 2\nhost = 'localhost'"
    env = {"ENGINEHOUSE_SERVER__PORT": "3", "ENGINEHOUSE_SERVER__SHUTDOWN_S": "4", "ENGINEHOUSE_CONFIG": "ignored"}

    server = load(tmp_path, text, env, server={"port": 5}).server

    assert (server.port, server.shutdown_s, server.host) == (5, 4.0, "localhost")
    assert isinstance(server.shutdown_s, float)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("[server]\nprot = 1", "server.prot", "did you mean 'port'"),
        ("[servr]\nport = 1", "servr", "did you mean 'server'"),
        ("[server]\nport = true", "server.port", "whole number, not True"),
        ("[server]\nport = '80'", "server.port", "whole number, not '80'"),
        ("[server]\nport = 80.0", "server.port", "whole number, not 80.0"),
        ("[server]\nport = 70000", "server.port", "must be <= 65535"),
        ("[server]\ninsecure = 1", "server.insecure", "true or false"),
        ("[server]\nshutdown_s = false", "server.shutdown_s", "a number, not False"),
        ("[server]\nunsupported_parameters = 'ignore'", "server.unsupported_parameters", "'reject', 'report'"),
        ("[server]\nallowed_hosts = 'example'", "server.allowed_hosts", "a list, not a string"),
        ("[server]\nallowed_hosts = ['a', 1]", "server.allowed_hosts[1]", "a string, not 1"),
        (
            "[server]\nallowed_hosts = ['a.example:8080']",
            "server.allowed_hosts",
            "without a port, not 'a.example:8080'",
        ),
        ("[server]\nallowed_hosts = ['https://a.example']", "server.allowed_hosts", "names such as app.example"),
        ("[server]\nallowed_hosts = ['[::1]']", "server.allowed_hosts", "not '[::1]'"),
        ("[media]\nallowed_hosts = ['https://a.example']", "media.allowed_hosts", "hosts such as images.example"),
        ("server = 1", "server", "a table, not a whole number"),
        ("[[server]]\nport = 1", "server", "a table, not a list"),
        ("models = 'x'", "models", "a table, not a string"),
        ("plugins = true", "plugins", "a table, not true or false"),
        ("limits = []\nmedia = 1", "limits", "a table, not a list"),
        ("[models]\nsmall = 'x'", "models.small", "a table"),
        ("[models.small]\nslots = 2", "models.small.source", "is required"),
        ("[models.small]\nsource = 'x'\ncontext = 0", "models.small.context", "must be > 0"),
        ("[models.small]\nsource = 'x'\nisolation = 'none'", "models.small.isolation", "'process', 'thread'"),
        ("[plugins]\nqueue = 3", "plugins.queue", "a table"),
        ("[auth]\nkeys = ['']", "auth.keys[0]", "empty"),
        ("[auth]\nkeys = ['k', {name = 'b', key = 'k', scopes = ['admin']}]", "auth.keys[1]", "same key"),
        ("[server]\ncors_origins = ['app.example']", "server.cors_origins", "https://app.example"),
        ("[server]\ncors_origins = ['https://app.example/page']", "server.cors_origins", "origins such as"),
        ("[models.a]\nsource='x'\n[models.b]\nsource='x'\naliases=['a']", "models.b.aliases", "'a' is taken"),
        ('[models."a\\r\\nset-cookie: b"]\nsource="x"', "models", "can be printed"),
        ("[models.a]\nsource='x'\naliases=[' ']", "models.a.aliases", "can be printed"),
        (
            "[models.a]\nsource='x'\naliases=['c']\n[models.b]\nsource='x'\naliases=['c']",
            "models.b.aliases",
            "model 'a'",
        ),
        (
            "[models.a]\nsource='x'\naliases=['fast']\n[models.a.alias_defaults.fats]\nseed=1",
            "models.a.alias_defaults.fats",
            "did you mean 'fast'",
        ),
    ],
)
def test_load_settings_names_what_is_wrong(tmp_path: Path, text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    assert caught.value.path == path
    assert words in caught.value.message
    assert "enginehouse.toml" in caught.value.message
    assert "\n" not in caught.value.message


def test_hosts_in_every_form_that_can_match(tmp_path: Path) -> None:
    hosts = "['*', 'app.example', '192.0.2.1', '2001:db8::1', 'host_name']"
    media = "['*', '.example.org', 'a.example:8443', '[2001:db8::1]:80', '127.0.0.1']"

    settings = load(tmp_path, f"[server]\nallowed_hosts = {hosts}\n[media]\nallowed_hosts = {media}")

    assert (len(settings.server.allowed_hosts), len(settings.media.allowed_hosts)) == (5, 5)


def test_load_settings_names_a_setting_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^router\.models: no model 'y' is served \(in "):
        load(tmp_path, "[models.x]\nsource = 'x'\n[router]\nmodels = ['y']")


def test_load_settings_reports_every_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[server]\nport = 'x'\nhots = 'y'\n[limits]\nmax_queue = -1")

    for path in ("server.port", "server.hots", "limits.max_queue"):
        assert path in caught.value.message


def test_load_settings_never_shows_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[auth]\nkeys = 'secret-key'")

    assert "secret-key" not in caught.value.message
    assert "secret-key" not in repr(load(tmp_path, "[auth]\nkeys = ['secret-key']"))


@pytest.mark.parametrize("text", ["server = [", b"\xff = 1".decode("latin-1")])
def test_load_settings_reports_bad_toml(tmp_path: Path, text: str) -> None:
    (tmp_path / "enginehouse.toml").write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(tmp_path / "enginehouse.toml", {})


def test_load_settings_reports_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        load_settings(tmp_path / "no.toml", {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "models.example"])
def test_settings_refuse_exposure_without_keys(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys"):
        load(tmp_path, f"[server]\nhost = '{host}'")

    assert load(tmp_path, f"[server]\nhost = '{host}'\n[auth]\nkeys = ['k']").server.host == host
    assert load(tmp_path, f"[server]\nhost = '{host}'\ninsecure = true").server.host == host


def test_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example", ""]))


def test_model_settings_keep_further_keys_as_backend_options(tmp_path: Path) -> None:
    model = load(tmp_path, "[models.small]\nsource = 'x'\nslots = 2\ngpu_layers = 3").models["small"]

    assert model == ModelSettings(source="x", slots=2, options={"gpu_layers": 3})


def test_model_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "chat.jinja").touch()
    monkeypatch.chdir(Path("/"))
    text = "[models.small]\nsource = 'model.gguf'\nchat_template = 'chat.jinja'\n[models.other]\nsource = 'starter'"

    models = load(tmp_path, text).models

    assert models["small"].source == str(tmp_path / "model.gguf")
    assert models["small"].chat_template == str(tmp_path / "chat.jinja")
    assert models["other"].source == "starter"


def test_environment_reaches_models_whose_names_variables_cannot_spell(tmp_path: Path) -> None:
    env = {"ENGINEHOUSE_MODELS__SMALL_1_5__CONTEXT": "2048", "ENGINEHOUSE_MODELS__NEW__SOURCE": "12"}

    models = load(tmp_path, "[models.'small-1.5']\nsource = 'x'", env).models

    assert models["small-1.5"].context == 2048
    assert models["new"].source == "12"


@pytest.mark.parametrize("text", ["one,two", " one , two,", "['one', 'two']"])
def test_environment_lists(text: str) -> None:
    assert load_settings(None, {"ENGINEHOUSE_AUTH__KEYS": text}).auth.keys == ("one", "two")


def test_environment_values_of_plugin_options_are_toml() -> None:
    env = {"ENGINEHOUSE_PLUGINS__TRACE__RATE": "0.5", "ENGINEHOUSE_PLUGINS__TRACE__PLACE": "not toml"}

    assert load_settings(None, env).plugins.options == {"trace": {"rate": 0.5, "place": "not toml"}}


@pytest.mark.parametrize(
    ("variable", "value", "path"),
    [
        ("ENGINEHOUSE_SERVER__PROT", "1", "server.prot"),
        ("ENGINEHOUSE_SERVER__PORT", "many", "server.port"),
        ("ENGINEHOUSE_SERVER__PORT", "1\nhost = '0.0.0.0'", "server.port"),
        ("ENGINEHOUSE_NOTHING__PORT", "1", "nothing"),
    ],
)
def test_environment_problems_name_the_setting(variable: str, value: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {variable: value})

    assert caught.value.path == path


@frozen(kw_only=True)
class Options:
    """Options of an imaginary backend."""

    threads: int = field(default=0, validator=ge(0))
    ratio: float | None = None


@pytest.mark.parametrize(
    ("text", "laid_over", "path"),
    [
        ("server = 5", {"server": {}}, "server"),
        ("server = 5", {"server": {"port": 8081}}, "server"),
        ("[[server]]\nport = 1", {"server": {"port": 8081}}, "server"),
        ("models = 5", {"models": {"m": {"source": "x"}}}, "models"),
        ("[models]\nm = 'x'", {"models": {"m": {"source": "x"}}}, "models.m"),
        ("[models.m]\nsource = 'x'\ndefaults = 5", {"models": {"m": {"defaults": {"top_k": 1}}}}, "models.m.defaults"),
        ("[models.m]\nsource = 'x'\nfaults = 5", {"models": {"m": {"faults": {"latch": "x"}}}}, "models.m.faults"),
        ("plugins = 5", {"plugins": {"x": {"y": 1}}}, "plugins"),
        ("[plugins]\nx = 5", {"plugins": {"x": {"y": 1}}}, "plugins.x"),
    ],
)
def test_nothing_hides_that_a_table_is_none(tmp_path: Path, text: str, laid_over: dict[str, Any], path: str) -> None:
    """Neither what the command line gives, which may be nothing, nor the environment."""

    def variables(table: dict[str, Any], prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in table.items():
            name = f"{prefix}__{key}".upper()
            found |= variables(value, name) if isinstance(value, dict) else {name: str(value)}
        return found

    env = {
        name.replace("ENGINEHOUSE__", "ENGINEHOUSE_"): value
        for name, value in variables(laid_over, "ENGINEHOUSE").items()
    }
    for sources in ({"overrides": laid_over}, {"env": env}):
        if sources.get("env") == {}:
            continue
        file = tmp_path / "enginehouse.toml"
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_settings(file, sources.get("env", {}), sources.get("overrides"))
        assert error.value.path == path
        assert error.value.message.startswith(f"{path}: must be a table, not ")
        assert str(file) in error.value.message


def test_settings_that_may_be_tables_are_replaced_by_one(tmp_path: Path) -> None:
    text = "[limits]\nmemory_budget = '1GiB'"

    assert load(tmp_path, text, {"ENGINEHOUSE_LIMITS__MEMORY_BUDGET__CPU": "5"}).limits.memory_budget is not None
    with pytest.raises(ConfigError, match=r"server\.port: must be a whole number, not a table"):
        load(tmp_path, "[server]\nport = 1", {"ENGINEHOUSE_SERVER__PORT__X": "5"})


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({"ENGINEHOUSE_SERVER": "5"}, "server"),
        ({"ENGINEHOUSE_MODELS": "x"}, "models"),
        ({"ENGINEHOUSE_MODELS__M": "x", "ENGINEHOUSE_MODELS__M__SOURCE": "x"}, "models.m"),
        ({"ENGINEHOUSE_PLUGINS__X": "5", "ENGINEHOUSE_PLUGINS__X__Y": "5"}, "plugins.x"),
    ],
)
def test_variables_that_are_no_tables_are_named(env: dict[str, str], path: str) -> None:
    with pytest.raises(ConfigError, match="table") as error:
        load_settings(None, env)
    assert error.value.path == path


def test_structure_options_reads_the_owners_class() -> None:
    assert structure_options(Options, {"threads": 2, "ratio": 1}, "models.m") == Options(threads=2, ratio=1.0)


@pytest.mark.parametrize(
    ("data", "path", "words"),
    [
        ({"thread": 2}, "models.m.thread", "did you mean 'threads'"),
        ({"slotz": 2}, "models.m.slotz", "did you mean 'slots'"),
        ({"threads": -1}, "models.m.threads", "must be >= 0"),
        ({"ratio": "1"}, "models.m.ratio", ""),
    ],
)
def test_structure_options_names_what_is_wrong(data: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure_options(Options, data, "models.m", also_known=("slots",))

    assert caught.value.path == path
    assert words in caught.value.message


# -- models in a budget ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "by_device"),
    [
        ('memory_budget = "8GiB"', {"cpu": 8 * 1024**3}),
        ("memory_budget = 500", {"cpu": 500}),
        ('memory_budget = { cpu = "1 MB", "cuda:0" = 7 }', {"cpu": 1_000_000, "cuda:0": 7}),
    ],
)
def test_memory_budget_is_an_amount_or_a_table_by_device(tmp_path, text, by_device):
    file = tmp_path / "enginehouse.toml"
    file.write_text(f"[limits]\n{text}\n")
    budget = load_settings(file, {}).limits.memory_budget

    assert budget is not None
    assert budget.by_device == by_device


def test_memory_budget_can_stand_in_the_environment():
    budget = load_settings(None, {"ENGINEHOUSE_LIMITS__MEMORY_BUDGET": "8 GiB"}).limits.memory_budget

    assert budget is not None
    assert budget.by_device == {"cpu": 8 * 1024**3}


@pytest.mark.parametrize("amount", ["8G", -1, True, 0, 1.5, ["8GiB"], {"cpu": "much"}])
def test_other_memory_budgets_are_refused_by_name(amount):
    with pytest.raises(ConfigError, match=r"limits\.memory_budget: must be"):
        load_settings(None, {}, {"limits": {"memory_budget": amount}})


def test_a_pinned_model_has_no_time_after_which_it_leaves():
    with pytest.raises(ConfigError, match="a pinned model is never unloaded") as refused:
        load_settings(None, {}, {"models": {"m": {"source": "x", "pin": True, "ttl": 5}}})

    assert refused.value.path == "models.m.ttl"
