"""The loader: what is broken is reported and stops nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from attrs import evolve, field, frozen

import enginehouse
from enginehouse.cli import main
from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe
from enginehouse.contract.commands import OWN_COMMANDS, Command
from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.contract.page import Page
from enginehouse.contract.sampler import role_of
from enginehouse.plugins import PluginRecord, PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings

HEADER = "import enginehouse\nfrom enginehouse import hookimpl\n"
WORKING = HEADER + "@hookimpl\ndef register_model_sources(register):\n    register('{name}', lambda: None)\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a one-module package: a module and a dist-info folder, as pip would leave them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install_one(name: str, code: str | object, *, distribution: str | None = None, target: str = "") -> None:
        distribution = distribution or f"third-party-{name}"
        module = f"plugin_of_{distribution}".replace("-", "_")
        if isinstance(code, str):
            (tmp_path / f"{module}.py").write_text(code)
        else:
            sys.modules[module] = code
        info = tmp_path / f"{distribution.replace('-', '_')}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[enginehouse]\n{name} = {target or module}\n")

    yield install_one
    for module in [name for name in sys.modules if name.startswith("plugin_of_")]:
        del sys.modules[module]


def load(**settings: Any) -> PluginRegistry:
    return PluginRegistry.load(PluginsSettings(**settings))


def record_of(registry: PluginRegistry, name: str, distribution: str | None = None) -> PluginRecord:
    found = [
        record for record in registry.plugins if record.name == name and distribution in (None, record.distribution)
    ]
    assert len(found) == 1, found
    return found[0]


def test_load_records_a_working_plugin(install: Install) -> None:
    install("zeta", WORKING.format(name="zeta-model"))

    registry = load()

    assert record_of(registry, "zeta") == PluginRecord(
        name="zeta",
        distribution="third-party-zeta",
        version="2.5",
        package="plugin_of_third_party_zeta",
        hooks=("register_model_sources",),
        brings=("model source zeta-model",),
    )
    assert registry.model_sources["zeta-model"]() is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "implements no hook"),
        (HEADER + "@hookimpl\ndef register_backend(register): pass", "did you mean 'register_backends'"),
        (HEADER + "@hookimpl\ndef register_backends(registry): pass", "registry"),
        (HEADER + "@hookimpl\ndef register_backends(register): raise OSError('disk')", "OSError: disk"),
        (
            HEADER + "@hookimpl\ndef register_backends(register): register()",
            "takes one object",
        ),
        (HEADER + "@hookimpl\ndef register_backends(register): register(object())", "lacks name, api_version"),
        (HEADER + "options = 3\n@hookimpl\ndef register_backends(register): pass", "options must be an attrs class"),
    ],
)
def test_load_reports_a_broken_plugin_and_goes_on(install: Install, code: str, reason: str) -> None:
    install("broken", code)
    install("zeta", WORKING.format(name="zeta-model"))

    registry = load()

    record = record_of(registry, "broken")
    assert record.error is not None
    assert reason in record.error
    assert "\n" not in record.error
    assert record.problem == f"broken (third-party-broken): {record.error}"
    assert record_of(registry, "zeta").error is None
    assert "zeta-model" in registry.model_sources


def test_load_reports_a_missing_attribute(install: Install) -> None:
    install("broken", "x = 1", target="plugin_of_third_party_broken:Plugin")

    assert "AttributeError" in (record_of(load(), "broken").error or "")


def test_load_reports_duplicate_names(install: Install) -> None:
    install("twin", WORKING.format(name="from-a"), distribution="a-package")
    install("twin", WORKING.format(name="from-b"), distribution="b-package")

    registry = load()

    assert record_of(registry, "twin", "a-package").error is None
    assert record_of(registry, "twin", "b-package").error == "the name is taken by the plugin of a-package"
    assert "from-a" in registry.model_sources
    assert "from-b" not in registry.model_sources


def test_load_prefers_first_party_over_a_plugin_of_the_same_name(install: Install) -> None:
    install("samplers", WORKING.format(name="impostor"), distribution="a-package")

    registry = load()

    assert record_of(registry, "samplers", "enginehouse").hooks
    assert record_of(registry, "samplers", "a-package").error is not None


def test_load_reports_one_object_under_two_names(install: Install) -> None:
    install("first", WORKING.format(name="once"))
    install("second", "", target="plugin_of_third_party_first")

    registry = load()

    assert record_of(registry, "first").error is None
    assert "same object as the plugin 'first'" in (record_of(registry, "second").error or "")
    assert "once" in registry.model_sources


@pytest.mark.parametrize("settings", [{"deny": ("tripwire",)}, {"allow": ("zeta",)}])
def test_load_never_imports_what_the_settings_exclude(install: Install, settings: dict[str, Any]) -> None:
    install("tripwire", "raise RuntimeError('imported')")
    install("zeta", WORKING.format(name="zeta-model"))

    registry = load(**settings)

    assert record_of(registry, "tripwire").skipped
    assert record_of(registry, "tripwire").error is None
    assert "zeta-model" in registry.model_sources
    assert not any(name.startswith("plugin_of_third_party_tripwire") for name in sys.modules)


class Plugin:
    """A plugin as an object; each test gives it the hooks it needs."""

    @classmethod
    def with_hook(cls, name: str, hook: Callable[..., None]) -> Plugin:
        return type("Made", (cls,), {name: staticmethod(enginehouse.hookimpl(hook, specname=name))})()


class TinyBackend:
    """A backend that is complete in form only."""

    opens = "model"

    def __init__(self, name: str = "tiny", api_version: int = API_VERSION, options: type[Any] | None = None) -> None:
        self.name, self.api_version, self.options = name, api_version, options or PluginOptions

    def probe(self) -> Probe:
        return Probe(True)

    def match(self, source: ModelSource) -> Match:
        return Match(0.0, "")

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        return MemoryEstimate(0, 0, 0)

    def open(self, source: ModelSource, options: Any, progress: Any) -> Any:
        raise AssertionError("not opened")


def install_hook(install: Install, name: str, hook_name: str, hook: Callable[..., None], **attributes: Any) -> None:
    plugin = Plugin.with_hook(hook_name, hook)
    for key, value in attributes.items():
        setattr(plugin, key, value)
    install(name, type(sys)(f"holder_{name}"), target=f"plugin_of_third_party_{name}:plugin")
    sys.modules[f"plugin_of_third_party_{name}"].plugin = plugin  # type: ignore[attr-defined]


@frozen(kw_only=True)
class PluginOptions:
    """Options of an imaginary plugin."""

    rate: float = 1.0
    context: int | None = None
    slots: int = 8


def test_hook_register_backends(install: Install) -> None:
    """The server process gets each backend by name."""
    backend = TinyBackend()
    install_hook(install, "one", "register_backends", lambda register: register(backend))

    assert load().backends["tiny"] == backend


def test_hook_register_model_sources(install: Install) -> None:
    """A source is called when its name is asked for, not at start."""
    source, calls = ModelSource("s"), []
    install_hook(
        install,
        "one",
        "register_model_sources",
        lambda register: register("mine", lambda: calls.append(1) or source),
    )

    registry = load()

    assert calls == []
    assert registry.model_sources["mine"]() is source


def test_hook_register_model_hubs(install: Install) -> None:
    """Hubs are known by name; one that lacks a method is refused without losing the others."""
    methods = {name: lambda self, *_: None for name in ("matches", "find", "is_complete", "advice", "download")}
    first = type("First", (), {"name": "first", "api_version": API_VERSION, **methods})()
    lame = type("Lame", (), {"name": "lame", "api_version": API_VERSION, **methods, "find": property()})()

    def implementation(register: Callable[[Any], None]) -> None:
        for hub in (lame, first):
            register(hub)

    install_hook(install, "one", "register_model_hubs", implementation)

    registry = load(allow=("one",))

    assert registry.model_hubs == {"first": first}
    assert record_of(registry, "one").error == "the model hub 'lame' lacks find"


def test_hook_register_routers(install: Install) -> None:
    """Routers are known by name; one that lacks a method is refused without losing the others."""
    decide = {"route": lambda self, question: None}
    first = type("First", (), {"name": "first", "api_version": API_VERSION, **decide})()
    lame = type("Lame", (), {"name": "lame", "api_version": API_VERSION})()

    def implementation(register: Callable[[Any], None]) -> None:
        for router in (lame, first):
            register(router)

    install_hook(install, "one", "register_routers", implementation)

    registry = load(allow=("one",))

    assert registry.routers == {"first": first}
    assert record_of(registry, "one").error == "the router 'lame' lacks route"


def test_hook_register_compressors(install: Install) -> None:
    """Compressors are known by name; one that does not say what it promises is refused without losing the others."""
    promises = {"is_budgeted": True, "is_idempotent": True, "needs_scores": False}
    work = {"compress": lambda self, task, tools: [[] for _ in task.texts], "api_version": API_VERSION}
    first = type("First", (), {"name": "first", **work, **promises})()
    lame = type("Lame", (), {"name": "lame", **work, "is_budgeted": True, "needs_scores": False})()

    def implementation(register: Callable[[Any], None]) -> None:
        for compressor in (lame, first):
            register(compressor)

    install_hook(install, "one", "register_compressors", implementation)

    registry = load(allow=("one",))

    assert registry.compressors == {"first": first}
    assert record_of(registry, "one").error == "the compressor 'lame' lacks is_idempotent"


def test_hook_register_pages(install: Install, tmp_path: Path) -> None:
    """A page is known by name; one without a start page is refused."""
    (tmp_path / "index.html").write_text("<!doctype html>", encoding="utf-8")
    mine, again, hollow = Page("mine", tmp_path), Page("mine", tmp_path), Page("hollow", tmp_path / "none")

    def implementation(register: Callable[[Page], None]) -> None:
        for page in (mine, again, hollow):
            register(page)

    install_hook(install, "one", "register_pages", implementation)

    registry = load(allow=("one",))

    assert registry.pages == {"mine": mine}
    error = record_of(registry, "one").error or ""
    assert "the page name 'mine' is taken by the plugin 'one'" in error
    assert f"the page 'hollow' has no index.html in its folder {str(tmp_path / 'none')!r}" in error


def test_hook_register_preparers(install: Install) -> None:
    """Preparers are known by name, and so are the request fields that they declare; no sampler may have them, too."""

    @frozen
    class Fields:
        haste: bool = False

    members = {"api_version": API_VERSION, "request_fields": Fields, "bind": lambda self, settings, objects: self}
    hasty, twin = (type("Hasty", (), {"name": name, **members})() for name in ("hasty", "twin"))

    def implementation(register: Callable[[Any], None]) -> None:
        for preparer in (hasty, twin):
            register(preparer)

    install_hook(install, "one", "register_preparers", implementation)

    registry = load(allow=("one",))

    haste = registry.request_fields["haste"]
    assert registry.preparers == {"hasty": hasty}
    assert (haste.owner, haste.plugin, haste.is_sampled) == ("hasty", "one", False)
    assert "the request field 'haste' is taken by 'one'" in (record_of(registry, "one").error or "")


def test_hook_register_commands(install: Install) -> None:
    """A command is known by name; core's own names and taken ones are refused, and nothing is imported."""
    mine, again, own = (
        Command(name, "no_such_package.module:command", "Does it.") for name in ("mine", "mine", "serve")
    )

    def implementation(register: Callable[[Command], None]) -> None:
        for command in (mine, own, again):
            register(command)

    install_hook(install, "one", "register_commands", implementation)

    registry = load(allow=("one",))

    assert registry.commands == {"mine": mine}
    assert record_of(registry, "one").error == (
        "the command name 'serve' is core's own; the command name 'mine' is taken by the plugin 'one'"
    )


def test_own_commands_are_those_of_the_command_line() -> None:
    offered = {name.partition(" ")[0] for name in load().commands}

    assert set(OWN_COMMANDS) == set(main.list_commands(click.Context(main))) - offered


def test_a_command_of_two_words_belongs_to_a_group_that_plugins_share(install: Install) -> None:
    """A group has no command's name, nor a command a group's."""
    names = ("tune left", "tune right", "tune", "serve left", "alone", "alone left", "tune left")
    target = "no_such_package.module:command"

    def implementation(register: Callable[[Command], None]) -> None:
        for name in names:
            register(Command(name, target, "Does it."))

    install_hook(install, "one", "register_commands", implementation)

    registry = load(allow=("one",))

    assert list(registry.commands) == ["tune left", "tune right", "alone"]
    error = record_of(registry, "one").error
    assert error is not None
    assert error.split("; ") == [
        "the command name 'tune' is taken by a group of commands",
        "the command 'serve left' cannot belong to the command 'serve'",
        "the command 'alone left' cannot belong to the command 'alone'",
        "the command name 'tune left' is taken by the plugin 'one'",
    ]


def sampler(name: str = "spice", api_version: int = API_VERSION, **fields: Any) -> Any:
    """A sampler with the given request fields."""
    fields_class = frozen(kw_only=True)(type("Fields", (), {"__annotations__": dict.fromkeys(fields, float), **fields}))
    attributes = {"name": name, "api_version": api_version, "request_fields": fields_class, "order": 50}
    return type("Sampler", (), {**attributes, "create": lambda self, fields: None})()


def test_hook_register_samplers(install: Install) -> None:
    """Samplers bring request fields, which the API validates and documents."""
    spice = sampler(spiciness=0.0)
    install_hook(install, "one", "register_samplers", lambda register: register(spice))

    registry = load()

    assert registry.samplers["spice"] == spice
    field = registry.request_fields["spiciness"]
    assert (field.owner, field.plugin, field.attribute.type) == ("spice", "one", float)


def test_hook_register_logits_processors(install: Install) -> None:
    """Processors bring request fields like samplers, and run as steps; a name is taken by either kind."""
    fields = frozen(kw_only=True)(type("Fields", (), {"__annotations__": {"calm": float}, "calm": 0.0}))
    attributes = {"name": "calmer", "api_version": API_VERSION, "request_fields": fields}
    calmer = type("Processor", (), {**attributes, "create": lambda self, fields: None})()

    def implementation(register: Callable[[Any], None]) -> None:
        register(calmer)
        register(calmer)

    install_hook(install, "one", "register_logits_processors", implementation)

    registry = load()

    assert registry.logits_processors["calmer"] == calmer
    assert role_of(registry.samplers["calmer"]) == "processor"
    assert registry.request_fields["calm"].owner == "calmer"
    assert "is taken" in (record_of(registry, "one").error or "")


def bound_to_models(kind: str, name: str, options: type[Any]) -> Any:
    """A drafter or an exit policy: the loader asks both for the same."""
    methods = {"bind": lambda self, context, options: None}
    return type(kind, (), {"name": name, "api_version": API_VERSION, "options": options, **methods})()


def register_three(install: Install, kind: str, hook: str) -> PluginRegistry:
    """A registry of three of them; the options of the third are no attrs class."""
    empty = frozen(type("Options", (), {"__annotations__": {}}))

    def implementation(register: Callable[[Any], None]) -> None:
        for name, options in (("second", empty), ("third", dict), ("first", empty)):
            register(bound_to_models(kind, name, options))

    install_hook(install, "one", hook, implementation)
    return load()


def test_hook_register_drafters(install: Install) -> None:
    """Drafters keep their order; one whose options are no attrs class is refused."""
    registry = register_three(install, "Drafter", "register_drafters")

    assert [name for name in registry.drafters if name in ("first", "second", "third")] == ["second", "first"]
    assert "options of the drafter 'third'" in (record_of(registry, "one").error or "")


def test_hook_register_exit_policies(install: Install) -> None:
    """Exit policies are kept by name; one whose options are no attrs class is refused."""
    registry = register_three(install, "ExitPolicy", "register_exit_policies")

    assert {"first", "second"} <= set(registry.exit_policies) and "third" not in registry.exit_policies
    assert "options of the exit policy 'third'" in (record_of(registry, "one").error or "")


def parser(name: str) -> Any:
    """A parser of either kind: the loader asks both for the same."""
    methods = {"match": lambda self, model: 0.5, "bind": lambda self, model: None}
    return type("Parser", (), {"name": name, "api_version": API_VERSION, **methods})()


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_parsers_keep_their_order_and_names_are_taken_once(install: Install, kind: str) -> None:
    first, second = parser("first"), parser("second")

    def implementation(register: Callable[[Any], None]) -> None:
        for candidate in (second, first, parser("second")):
            register(candidate)

    install_hook(install, "one", f"register_{kind}_parsers", implementation)

    registry = load(allow=("one",))

    assert list(getattr(registry, f"{kind}_parsers").values()) == [second, first]
    assert record_of(registry, "one").error == f"the {kind} parser name 'second' is taken by the plugin 'one'"


def test_hook_register_tool_parsers(install: Install) -> None:
    one = parser("one")
    install_hook(install, "one", "register_tool_parsers", lambda register: register(one))

    assert load(allow=("one",)).tool_parsers == {"one": one}


def test_hook_register_reasoning_parsers(install: Install) -> None:
    one = parser("one")
    install_hook(install, "one", "register_reasoning_parsers", lambda register: register(one))

    assert load(allow=("one",)).reasoning_parsers == {"one": one}


def decoder(name: str = "pattern", kinds: Iterable[str] = ("regex",)) -> Any:
    """A structured decoder that enforces the given kinds."""
    attributes = {"name": name, "api_version": API_VERSION, "kinds": frozenset(kinds)}
    return type("Decoder", (), {**attributes, "bind": lambda self, tokenizer: None})()


def test_hook_register_structured_decoders(install: Install) -> None:
    """Decoders keep the order in which they came; one that names a kind that does not exist is refused."""
    first, second = decoder("first"), decoder("second", ("regex", "lark"))

    def implementation(register: Callable[[Any], None]) -> None:
        for candidate in (first, decoder("wrong", ("yaml",)), second):
            register(candidate)

    install_hook(install, "one", "register_structured_decoders", implementation)

    registry = load(allow=("one",))

    assert list(registry.structured_decoders.values()) == [first, second]
    assert record_of(registry, "one").error == "the structured decoder 'wrong' names unknown kinds: yaml"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"name": "other", "spiciness": 0.0}, "the request field 'spiciness' is taken by 'one'"),
        ({"name": "spice", "heat": 0.0}, "the sampler name 'spice' is taken by the plugin 'one'"),
        ({"name": "other", "top_p": 1.0}, "the request field 'top_p' is core's own"),
        ({"name": "other", "heat": field()}, "needs a default that means off"),
    ],
)
def test_load_refuses_colliding_samplers_but_keeps_the_plugins_others(
    install: Install, second: dict[str, Any], reason: str
) -> None:
    install_hook(install, "one", "register_samplers", lambda register: register(sampler(spiciness=0.0)))

    def register_two(register: Callable[[Any], None]) -> None:
        register(sampler(**second))
        register(sampler(name="fine", fineness=0.0))

    install_hook(install, "two", "register_samplers", register_two)

    registry = load()

    assert reason in (record_of(registry, "two").error or "")
    assert record_of(registry, "one").error is None
    assert registry.request_fields["spiciness"].plugin == "one"
    assert "fine" in registry.samplers


@pytest.mark.parametrize("api_version", [API_VERSION + 1, 0, -1])
def test_load_refuses_other_api_versions(install: Install, api_version: int) -> None:
    install_hook(install, "old", "register_backends", lambda register: register(TinyBackend(api_version=api_version)))

    registry = load()

    assert f"api_version {api_version}" in (record_of(registry, "old").error or "")
    assert "tiny" not in registry.backends


def test_load_accepts_the_previous_api_version(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_hook(install, "old", "register_backends", lambda register: register(TinyBackend()))
    newer = {**KINDS, "backends": evolve(KINDS["backends"], api_version=API_VERSION + 1)}
    monkeypatch.setattr("enginehouse.plugins.loader.KINDS", newer)

    assert "tiny" in load().backends


def test_load_refuses_a_backend_whose_options_are_no_attrs_class(install: Install) -> None:
    install_hook(install, "one", "register_backends", lambda register: register(TinyBackend(options=dict)))

    assert "options of the backend 'tiny'" in (record_of(load(), "one").error or "")


def test_load_refuses_a_taken_model_source(install: Install) -> None:
    for name in ("one", "two"):
        install_hook(install, name, "register_model_sources", lambda register: register("mine", lambda: None))

    registry = load()

    assert record_of(registry, "one").error is None
    assert record_of(registry, "two").error == "the model source name 'mine' is taken by the plugin 'one'"


def test_plugin_options_reach_the_hook(install: Install) -> None:
    seen: list[Any] = []
    install_hook(
        install, "one", "register_backends", lambda register, options: seen.append(options), options=PluginOptions
    )
    install_hook(install, "two", "register_backends", lambda register, options: seen.append(options))

    load(options={"one": {"rate": 2}})

    assert seen == [PluginOptions(rate=2.0), None]


def test_a_submodule_named_options_is_no_declaration(install: Install) -> None:
    install("mine", WORKING.format(name="mine") + "import types\noptions = types.ModuleType('mine.options')\n")

    assert record_of(load(), "mine").error is None


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"one": {"rat": 2}}, "plugins.one.rat"),
        ({"one": {"rate": "2"}}, "plugins.one.rate"),
        ({"two": {"rate": 2}}, "plugins.two"),
    ],
)
def test_wrong_plugin_options_are_the_users_to_mend(
    install: Install, options: dict[str, dict[str, Any]], path: str
) -> None:
    install_hook(install, "one", "register_backends", lambda register: None, options=PluginOptions)
    install_hook(install, "two", "register_backends", lambda register: None)

    with pytest.raises(ConfigError) as caught:
        load(options=options)

    assert caught.value.path == path


def test_b20_plugin_added_inside_a_hook_takes_part_from_the_next_round_on(install: Install) -> None:
    """B20: plugin A adds plugin B inside a hook that both implement."""
    calls: list[str] = []
    helper = Plugin.with_hook("register_backends", lambda register: calls.append("helper"))

    def register_and_add(register: Any, add_plugin: Any) -> None:
        calls.append("a begins")
        add_plugin("helper", helper)
        calls.append("a ends")

    install_hook(install, "a", "register_backends", register_and_add)
    install_hook(install, "b", "register_backends", lambda register: calls.append("b"))

    registry = load()

    assert calls == ["a begins", "a ends", "b", "helper"]
    record = record_of(registry, "helper")
    assert (record.distribution, record.version, record.error) == ("third-party-a", "2.5", None)


def test_plugin_added_late_still_gets_the_earlier_hooks(install: Install) -> None:
    helper = Plugin.with_hook("register_backends", lambda register: register(TinyBackend("late")))
    install_hook(install, "a", "register_samplers", lambda register, add_plugin: add_plugin("helper", helper))

    assert "late" in load().backends


def test_plugin_added_under_a_taken_name_is_an_error_of_the_adder(install: Install) -> None:
    helper = Plugin.with_hook("register_backends", lambda register: None)
    install_hook(install, "a", "register_backends", lambda register, add_plugin: add_plugin("a", helper))

    assert "the name is taken" in (record_of(load(), "a").error or "")


def test_hooks_of_kinds_that_a_process_does_not_use_are_not_called(install: Install) -> None:
    install(
        "both", WORKING.format(name="both-model") + "\n\n@enginehouse.hookimpl\ndef register_pages(register): 1 / 0\n"
    )

    registry = PluginRegistry.load(PluginsSettings(), kinds=("model_sources",))

    assert "both-model" in registry.model_sources and not registry.surfaces
    assert record_of(registry, "both").error is None
    assert record_of(load(), "both").error is not None


def test_names_of_plugins_that_are_not_installed_are_complaints() -> None:
    """A plugin that was uninstalled never stops a start."""
    settings = {"allow": ("samplerz",), "deny": ("nothere", "parsers"), "options": {"banlist": {"words": 3}}}

    registry = PluginRegistry.for_settings(Settings(plugins=PluginsSettings(**settings)))

    assert registry.complaints == (
        "plugins.allow: the plugin 'samplerz' is not installed (did you mean 'samplers'?)",
        "plugins.deny: the plugin 'nothere' is not installed",
        "plugins.banlist: the plugin 'banlist' is not installed",
    )


def test_test_backends_load_only_when_named() -> None:
    assert {"fake", "scripted"}.isdisjoint(PluginRegistry.for_settings(Settings()).backends)

    models = {"one": ModelSettings(source="x", backend="fake"), "two": ModelSettings(source="x", backend="scripted")}
    registry = PluginRegistry.for_settings(Settings(models=models))

    assert {"fake", "scripted"} <= set(registry.backends)
    assert record_of(registry, "fake").distribution == "enginehouse_testkit"


def test_registries_are_read_only() -> None:
    with pytest.raises(TypeError):
        load().backends["x"] = TinyBackend()  # type: ignore[index]


def asking(registry: PluginRegistry, name: str, token: str) -> Identity | None:
    return registry.authenticators[name].identify(Credentials(token=token))


def test_hook_authenticate(install: Install) -> None:
    """It is called per request, with the plugin's options where it wants them."""
    options = PluginOptions()
    seen: list[Any] = []

    def authenticate(credentials: Credentials, options: PluginOptions) -> Identity | None:
        seen.append(options)
        return Identity(name=f"user-{options.slots}") if credentials.token == "right" else None

    install_hook(install, "one", "authenticate", authenticate, options=PluginOptions)
    install_hook(install, "two", "authenticate", lambda credentials: Identity(name="everybody"))
    registry = load(options={"one": {"slots": 3}})
    assert seen == [] and set(registry.authenticators) >= {"one", "two"}

    found = asking(registry, "one", "right")
    assert found is not None and (found.name, found.namespace) == ("one:user-3", "one:user-3")
    assert asking(registry, "one", "wrong") is None
    assert asking(registry, "two", "wrong").name == "two:everybody"
    assert seen == [PluginOptions(slots=3)] * 2 != [options] * 2


@pytest.mark.parametrize(
    "answer",
    [
        "alice",
        Identity(name=""),
        Identity(name="two words"),
        Identity(name="a", profile="openapi"),
        Identity(name="a", expires=datetime(2020, 1, 1, tzinfo=UTC)),
        ZeroDivisionError(),
    ],
    ids=repr,
)
def test_an_authenticator_that_fails_denies(install: Install, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    def authenticate(credentials: Credentials) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    install_hook(install, "one", "authenticate", authenticate)
    with pytest.raises(PluginError, match="The authenticator 'one' of the plugin 'one'"):
        asking(load(), "one", "anything")

    assert "the authenticator 'one' of the plugin 'one'" in caplog.text


def test_only_plugins_that_exist_authenticate(install: Install) -> None:
    install("other", WORKING.format(name="other-model"))
    registry = load()
    for name, problem in (("other", "'other' brings model source"), ("jvt", "did you mean 'jwt'")):
        with pytest.raises(ConfigError, match=problem):
            registry.check_authenticators([name])
