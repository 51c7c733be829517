"""Discovers plugins through their entry points, imports them one by one, and calls their register hooks.

A plugin is the target of an entry point in the group ``enginehouse``: a module or object with functions marked
``@enginehouse.hookimpl``. Pluggy's own loader is not used: it stops at the first broken plugin and skips duplicate
names silently. This is the only module that calls hooks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import attrs
import pluggy
from attrs import define, evolve, field

from enginehouse.contract import hookspecs
from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.plugins.kinds import KINDS, Kind
from enginehouse.plugins.records import PluginRecord, PluginRecords
from enginehouse.plugins.registration import Registration
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse.settings.structuring import closest

__all__ = ["TEST_BACKENDS", "PluginLoader"]

_GROUP = "enginehouse"
TEST_BACKENDS = {
    "fake": "enginehouse_testkit.fake_runner:FakeBackend",
    "scripted": "enginehouse_testkit.scripted:ScriptedBackend",
}
"""Backends that are not plugins: they are loaded only if a configuration names them."""


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(_GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


@define(eq=False)
class PluginLoader:
    """Single-use plugin loader; ``records`` and ``registration`` are the result."""

    settings: PluginsSettings
    records: PluginRecords = field(factory=PluginRecords)
    registration: Registration = field(factory=Registration)
    _options: dict[str, Any] = field(factory=dict)
    _manager: pluggy.PluginManager = field(factory=_manager)

    def discover(self) -> None:
        """Import the plugins of all installed packages, in an order that does not depend on the machine.

        Raises:
            ConfigError: the options of a plugin are invalid.
        """
        for entry_point in sorted(entry_points(group=_GROUP), key=_load_order):
            record = _record_of(entry_point)
            first = self.records.by_name.get(record.name)
            if first is not None:
                self.records.add_duplicate(record, f"the name is taken by the plugin of {first.distribution}")
            elif not self._is_allowed(record.name):
                self.records.by_name[record.name] = evolve(record, skipped=True)
            else:
                self.records.by_name[record.name] = record
                with self.records.recording(record.name):
                    self._add(entry_point.load(), record)

    def add_test_backend(self, name: str) -> None:
        """Register a backend of :mod:`enginehouse_testkit`, which is imported only here."""
        record = PluginRecord(name=name, distribution="enginehouse_testkit", version="", hooks=("register_backends",))
        self.records.by_name[f"{name} {record.distribution}"] = record
        module, _, attribute = TEST_BACKENDS[name].partition(":")
        with self.records.recording(f"{name} {record.distribution}"):
            backend = getattr(importlib.import_module(module), attribute)()
            self.registration.register(KINDS["backends"], name, backend)

    def collect(self) -> None:
        """Call each register hook of each plugin once, and wrap the hooks that are called while the server runs."""
        collected = [kind for kind in KINDS.values() if kind.wrap is None]
        called: set[tuple[str, str]] = set()
        # The list of a round is fixed: plugins that are added during a round are included in the next one.
        while waiting := [
            (kind, name)
            for kind in collected
            for name, _ in self._manager.list_name_plugin()
            if (kind.name, name) not in called
        ]:
            for kind, name in waiting:
                called.add((kind.name, name))
                self._call(kind, name)
        for kind in KINDS.values():
            if kind.wrap is not None:
                for plugin in getattr(self._manager.hook, kind.hook).get_hookimpls():
                    name = plugin.plugin_name
                    self.registration.add(kind, name, name, kind.wrap(name, self._asking(kind.hook, name)))

    def _call(self, kind: Kind, name: str) -> None:
        """Call one hook of one plugin. An invalid object is refused; the plugin's other objects are kept."""
        accept = self.registration.register_function if kind.takes_functions else self.registration.register

        def register(*items: Any) -> None:
            with self.records.recording(name):
                accept(kind, name, *items)

        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        with self.records.recording(name):
            self._manager.subset_hook_caller(kind.hook, remove_plugins=others)(
                register=register,
                options=self._options[name],
                add_plugin=lambda added, plugin: self._add_by_plugin(name, added, plugin),
            )

    def _asking(self, hook: str, name: str) -> Callable[..., Any]:
        """Return the hook of one plugin as a plain function, with the plugin's options."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        return functools.partial(caller, options=self._options[name])

    def _is_allowed(self, name: str) -> bool:
        allow = self.settings.allow
        return name not in self.settings.deny and (allow is None or name in allow)

    def _add(self, plugin: object, record: PluginRecord) -> None:
        """Register a plugin: check its hooks and read its options."""
        if self._manager.is_registered(plugin):
            raise PluginError(f"it is the same object as the plugin {self._manager.get_name(plugin)!r}", record.name)
        try:
            self._manager.register(plugin, record.name)
            hooks = sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
            self.records.by_name[record.name] = evolve(record, hooks=tuple(hooks))
            self._check_hooks(hooks)
            self._options[record.name] = self._read_options(plugin, record.name)
        except Exception:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise

    def _add_by_plugin(self, parent: str, name: str, plugin: object) -> None:
        """Register a plugin that another plugin adds; it belongs to the same distribution."""
        if name in self.records.by_name:
            raise PluginError(f"cannot add the plugin {name!r}: the name is taken", parent)
        record = evolve(self.records.by_name[parent], name=name, hooks=(), error=None)
        self.records.by_name[name] = record
        with self.records.recording(name):
            self._add(plugin, record)

    def _check_hooks(self, hooks: Sequence[str]) -> None:
        known = tuple(kind.hook for kind in KINDS.values())
        for name in hooks:
            if name not in known:
                raise PluginError(f"there is no hook {name!r}{closest(name, known)}")
        if not hooks:
            raise PluginError("it implements no hook; mark functions with @enginehouse.hookimpl")

    def _read_options(self, plugin: object, name: str) -> Any:
        """Return the plugin's settings as an instance of its ``options`` class; None if it declares none."""
        data, path = self.settings.options.get(name, {}), f"plugins.{name}"
        options_class = getattr(plugin, "options", None)
        if options_class is None or isinstance(options_class, ModuleType):  # a submodule named options declares nothing
            if data:
                raise ConfigError(f"{path}: this plugin has no options", path)
            return None
        if not (isinstance(options_class, type) and attrs.has(options_class)):
            raise PluginError("options must be an attrs class")
        return structure_options(options_class, data, path)


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
