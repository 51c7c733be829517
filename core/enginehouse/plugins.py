"""Finds plugins, loads them one by one, and sorts what they hand over into typed registries.

A plugin is whatever an entry point in the group ``enginehouse`` names: a module or object with functions
marked ``@enginehouse.hookimpl``. One that is broken is recorded with its reason and stops nothing. This
and :mod:`enginehouse.hookspecs` are the only modules that know pluggy; the rest of core sees the
registries only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, ModuleType
from typing import Any

import attrs
import pluggy
from attrs import define, evolve, field, frozen

from enginehouse import hookspecs
from enginehouse.backend import Backend, ModelSource
from enginehouse.config import PluginsSettings, Settings, structure_options
from enginehouse.errors import ConfigError, PluginError
from enginehouse.hookspecs import API_VERSION
from enginehouse.request_fields import CORE_FIELDS, RequestField, fields_of
from enginehouse.sampler import SamplerPlugin
from enginehouse.structuring import closest

__all__ = ["PluginRecord", "PluginRegistry"]

_GROUP = "enginehouse"
_TEST_BACKENDS = {
    "fake": "enginehouse.testing.fake_runner:FakeBackend",
    "scripted": "enginehouse.testing.scripted:ScriptedBackend",
}
_FindSource = Callable[[], ModelSource | None]


@frozen(kw_only=True)
class PluginRecord:
    """What became of one installed plugin.

    Attributes:
        name: its entry point, or the name under which another plugin added it.
        distribution: the installed package that brings it.
        version: that package's version.
        hooks: names of the hooks that it implements, sorted; empty when it was not imported.
        error: why it, or a part of it, does not work; None when all is well.
        skipped: the settings say that it must not be imported; ``error`` is None then.
    """

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    error: str | None = None
    skipped: bool = False

    @property
    def problem(self) -> str | None:
        """The error as one line, ``name (distribution): reason``."""
        return f"{self.name} ({self.distribution}): {self.error}" if self.error else None


@frozen(kw_only=True)
class PluginRegistry:
    """Everything that the loaded plugins offer, by name; read-only.

    Attributes:
        backends: backend by name.
        samplers: sampler by name.
        model_sources: function that finds a model, by the name that users ask for.
        request_fields: field that a plugin added to the request body, by name.
        plugins: every installed plugin, loaded or not, in load order.
    """

    backends: Mapping[str, Backend]
    samplers: Mapping[str, SamplerPlugin]
    model_sources: Mapping[str, _FindSource]
    request_fields: Mapping[str, RequestField]
    plugins: Sequence[PluginRecord]

    @classmethod
    def load(cls, settings: PluginsSettings, builtin: Iterable[str] = ()) -> PluginRegistry:
        """Load every installed plugin that ``settings`` allow.

        Args:
            settings: the allow and deny lists and the plugins' options.
            builtin: backend names in use; those of the test backends ``fake`` and ``scripted`` load these.

        Raises:
            ConfigError: the options of a plugin are wrong.
        """
        loader = _Loader(settings)
        loader.discover()
        for name in sorted(set(builtin) & set(_TEST_BACKENDS)):
            loader.add_test_backend(name)
        loader.collect()
        return cls(
            backends=MappingProxyType(loader.backends),
            samplers=MappingProxyType(loader.samplers),
            model_sources=MappingProxyType(loader.model_sources),
            request_fields=MappingProxyType(loader.request_fields),
            plugins=tuple(loader.records.values()),
        )

    @classmethod
    def for_settings(cls, settings: Settings, also: Iterable[str] = ()) -> PluginRegistry:
        """Load for the server process, where every plugin that the settings name must be installed.

        Args:
            settings: all settings; their models name the backends in use.
            also: backend names in use that the settings do not know of.

        Raises:
            ConfigError: ``[plugins]`` names a plugin that is not installed, or its options are wrong.
        """
        backends = [model.backend for model in settings.models.values() if model.backend]
        registry = cls.load(settings.plugins, builtin=[*backends, *also])
        registry.check_names(settings.plugins)
        return registry

    def check_names(self, settings: PluginsSettings) -> None:
        """Raise ConfigError when ``settings`` name a plugin that is not installed."""
        known = tuple(record.name for record in self.plugins)
        for path, names in (
            ("plugins.allow", settings.allow or ()),
            ("plugins.deny", settings.deny),
            ("plugins", settings.options),
        ):
            for name in names:
                if name not in known:
                    raise ConfigError(f"{path}: no plugin {name!r} is installed{closest(name, known)}", path)


@define(eq=False)
class _Loader:
    """Collects while plugins load; thrown away afterwards."""

    settings: PluginsSettings
    manager: pluggy.PluginManager = field(factory=lambda: pluggy.PluginManager(_GROUP))
    records: dict[str, PluginRecord] = field(factory=dict)
    options: dict[str, Any] = field(factory=dict)
    backends: dict[str, Backend] = field(factory=dict)
    samplers: dict[str, SamplerPlugin] = field(factory=dict)
    model_sources: dict[str, _FindSource] = field(factory=dict)
    request_fields: dict[str, RequestField] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.manager.add_hookspecs(hookspecs)

    def discover(self) -> None:
        """Import the plugins of all installed packages, in an order that does not depend on the machine."""
        for entry_point in sorted(entry_points(group=_GROUP), key=_load_order):
            record = _record_of(entry_point)
            first = self.records.get(record.name)
            if first is not None:
                message = f"the name is taken by the plugin of {first.distribution}"
                self.records[f"{record.name} {record.distribution}"] = evolve(record, error=message)
                continue
            allow = self.settings.allow
            if record.name in self.settings.deny or (allow is not None and record.name not in allow):
                self.records[record.name] = evolve(record, skipped=True)
                continue
            self.records[record.name] = record
            with _Recording(self, record.name):
                self.add(entry_point.load(), record)

    def add(self, plugin: object, record: PluginRecord) -> None:
        """Take a plugin in: check its hooks and read its options."""
        if self.manager.is_registered(plugin):
            raise PluginError(f"it is the same object as the plugin {self.manager.get_name(plugin)!r}", record.name)
        try:
            self.manager.register(plugin, record.name)
            hooks = sorted(caller.name for caller in self.manager.get_hookcallers(plugin) or ())
            self.records[record.name] = evolve(record, hooks=tuple(hooks))
            self._check_hooks(hooks)
            self.options[record.name] = self._read_options(plugin, record.name)
        except Exception:
            if self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise

    def _check_hooks(self, hooks: Sequence[str]) -> None:
        known = tuple(_hook_names())
        for name in hooks:
            if name not in known:
                raise PluginError(f"there is no hook {name!r}{closest(name, known)}")
        if not hooks:
            raise PluginError("it implements no hook; mark functions with @enginehouse.hookimpl")

    def _read_options(self, plugin: object, name: str) -> Any:
        """The plugin's settings as an instance of its ``options`` class; None when it declares none."""
        data, path = self.settings.options.get(name, {}), f"plugins.{name}"
        options_class = getattr(plugin, "options", None)
        if options_class is None or isinstance(options_class, ModuleType):  # a submodule named options declares nothing
            if data:
                raise ConfigError(f"{path}: this plugin has no options", path)
            return None
        if not (isinstance(options_class, type) and attrs.has(options_class)):
            raise PluginError("options must be an attrs class")
        return structure_options(options_class, data, path)

    def add_test_backend(self, name: str) -> None:
        """Register a backend of :mod:`enginehouse.testing`; it is imported only here."""
        record = PluginRecord(name=name, distribution="enginehouse.testing", version="", hooks=("register_backends",))
        key = f"{name} {record.distribution}"
        self.records[key] = record
        with _Recording(self, key):
            module, _, attribute = _TEST_BACKENDS[name].partition(":")
            self.register_backend(name, getattr(importlib.import_module(module), attribute)())

    def collect(self) -> None:
        """Call each register hook of each plugin once, and sort what comes."""
        registers: dict[str, Callable[..., None]] = {
            "register_backends": self.register_backend,
            "register_model_sources": self.register_model_source,
            "register_samplers": self.register_sampler,
        }
        called: set[tuple[str, str]] = set()
        # The list of a round is fixed: a plugin that another one adds takes part from the next round on.
        while waiting := [
            (hook, name)
            for hook in registers
            for name, _ in self.manager.list_name_plugin()
            if (hook, name) not in called
        ]:
            for hook, name in waiting:
                called.add((hook, name))
                self._call(hook, name, registers[hook])

    def _call(self, hook: str, name: str, register: Callable[..., None]) -> None:
        others = [plugin for other, plugin in self.manager.list_name_plugin() if other != name]
        with _Recording(self, name):
            self.manager.subset_hook_caller(hook, remove_plugins=others)(
                register=lambda *items: self._register(name, register, items),
                options=self.options[name],
                add_plugin=lambda added, plugin: self._add_by_plugin(name, added, plugin),
            )

    def _register(self, plugin: str, register: Callable[..., None], items: tuple[Any, ...]) -> None:
        """Refuse one bad object without losing the plugin's other ones."""
        with _Recording(self, plugin):
            register(plugin, *items)

    def _add_by_plugin(self, parent: str, name: str, plugin: object) -> None:
        """Take in a plugin that another plugin brings; it counts as part of the same distribution."""
        if name in self.records:
            raise PluginError(f"cannot add the plugin {name!r}: the name is taken", parent)
        parent_record = self.records[parent]
        record = PluginRecord(name=name, distribution=parent_record.distribution, version=parent_record.version)
        self.records[name] = record
        with _Recording(self, name):
            self.add(plugin, record)

    def register_backend(self, plugin: str, backend: Backend) -> None:
        """Check and keep a backend."""
        _check_object("backend", backend, Backend, self.backends)
        if not attrs.has(backend.options):
            raise PluginError(f"the options of the backend {backend.name!r} must be an attrs class", plugin)
        self.backends[backend.name] = backend

    def register_sampler(self, plugin: str, sampler: SamplerPlugin) -> None:
        """Check and keep a sampler and its request fields."""
        _check_object("sampler", sampler, SamplerPlugin, self.samplers)
        declared = fields_of(sampler.request_fields, sampler.name, plugin)
        for declaration in declared:
            if declaration.name in CORE_FIELDS:
                raise PluginError(f"the request field {declaration.name!r} is core's own", plugin)
            if other := self.request_fields.get(declaration.name):
                raise PluginError(f"the request field {declaration.name!r} is taken by {other.plugin!r}", plugin)
        self.samplers[sampler.name] = sampler
        self.request_fields.update({declaration.name: declaration for declaration in declared})

    def register_model_source(self, plugin: str, name: str, find: _FindSource) -> None:
        """Check and keep a model source."""
        if name in self.model_sources:
            raise PluginError(f"the model source {name!r} is taken", plugin)
        if not callable(find):
            raise PluginError(f"the model source {name!r} must be a function", plugin)
        self.model_sources[name] = find


@define
class _Recording:
    """Turns an exception into the error of one plugin, so that the others go on. This border may be broad."""

    loader: _Loader
    key: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # A ConfigError is the user's to mend and must be seen. A plugin that exits while it is imported is broken.
        if isinstance(error, ConfigError) or not isinstance(error, Exception | SystemExit):
            return False
        reason = error.message if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        record = self.loader.records[self.key]
        known = f"{record.error}; " if record.error else ""
        self.loader.records[self.key] = evolve(record, error=known + " ".join(reason.split()))
        return True


def _load_order(entry_point: EntryPoint) -> tuple[bool, str, str]:
    record = _record_of(entry_point)
    return record.distribution != "enginehouse", record.name, record.distribution


def _record_of(entry_point: EntryPoint) -> PluginRecord:
    distribution = entry_point.dist
    return PluginRecord(
        name=entry_point.name,
        distribution=distribution.name if distribution else "unknown",
        version=distribution.version if distribution else "",
    )


def _hook_names() -> Iterator[str]:
    marks = pluggy.PluginManager(_GROUP)
    return (name for name in dir(hookspecs) if marks.parse_hookspec_opts(hookspecs, name) is not None)


def _check_object(noun: str, candidate: Any, protocol: type[Any], taken: Mapping[str, object]) -> None:
    """Raise PluginError unless ``candidate`` has what ``protocol`` asks for, a version we know and a free name."""
    name = getattr(candidate, "name", candidate)
    wanted = [*protocol.__annotations__, *(key for key in vars(protocol) if not key.startswith("_"))]
    missing = [key for key in wanted if not hasattr(candidate, key)]
    if missing:
        raise PluginError(f"the {noun} {name!r} lacks {', '.join(missing)}")
    oldest = max(1, API_VERSION - 1)
    if not oldest <= candidate.api_version <= API_VERSION:
        raise PluginError(
            f"the {noun} {name!r} has api_version {candidate.api_version!r}; "
            f"this Enginehouse takes {oldest} to {API_VERSION}"
        )
    if name in taken:
        raise PluginError(f"the {noun} name {name!r} is taken")
