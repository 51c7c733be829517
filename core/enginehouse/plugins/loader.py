"""Discovers plugins through their entry points, imports them one by one, and calls their register hooks.

A plugin is the target of an entry point in the group ``enginehouse``: a module or object with functions marked
``@enginehouse.hookimpl``. Pluggy's own loader is not used: it stops at the first broken plugin and skips duplicate
names silently. This is the only module that calls hooks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import Any

import attrs
import pluggy
from attrs import define, evolve, field

from enginehouse.contract import hookspecs
from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.plugins.kinds import KINDS, Kind
from enginehouse.plugins.registration import PluginRecord, PluginRecords, Registration
from enginehouse.process import standard_output_as_error
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse.settings.structuring import closest

_GROUP = "enginehouse"
_OWN = "enginehouse"  # the distribution of core and of the first-party plugins
_TEST_KIT = "enginehouse_testkit"
_Offer = tuple[str, tuple[Any, ...]]  # a plugin's name, and what it gave to ``register``

_printing = threading.RLock()
"""Held while standard output is redirected, which concerns the whole process."""

TEST_BACKENDS = {
    "fake": "enginehouse_testkit.fake_runner:FakeBackend",
    "fake-fleet": "enginehouse_testkit.fake_fleet:FakeFleetBackend",
    "fake-pooler": "enginehouse_testkit.fake_pooler:FakePoolerBackend",
    "scripted": "enginehouse_testkit.scripted:ScriptedBackend",
}
"""Backends that are not plugins: they are loaded only if a configuration names them."""


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(_GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def installed_plugins() -> list[tuple[PluginRecord, EntryPoint]]:
    """Return a record and the entry point of each installed plugin, in load order; imports nothing.

    Enginehouse's own come first; of several with one name, that of the distribution with this name. The order does not
    depend on the machine.
    """
    names: dict[Distribution | None, tuple[str, str]] = {None: ("unknown", "")}
    found = []
    for entry_point in entry_points(group=_GROUP):
        distribution = entry_point.dist
        if distribution is not None and distribution not in names:  # its metadata are read once: a millisecond each
            metadata = distribution.metadata
            names[distribution] = metadata["Name"] or "unknown", metadata["Version"] or ""
        name, version = names[distribution]
        package = entry_point.module.partition(".")[0]
        found.append(
            (PluginRecord(name=entry_point.name, distribution=name, version=version, package=package), entry_point)
        )
    return sorted(found, key=lambda pair: _load_order(pair[0]))


def versions_of(records: Iterable[PluginRecord]) -> dict[tuple[str, str], str]:
    """Return the version of each plugin, by its name and distribution."""
    return {(record.name, record.distribution): record.version for record in records}


@define(eq=False)
class PluginLoader:
    """Single-use plugin loader; ``records`` and ``registration`` are the result."""

    settings: PluginsSettings
    records: PluginRecords = field(factory=PluginRecords)
    registration: Registration = field(factory=Registration)
    _options: dict[str, Any] = field(factory=dict)
    _manager: pluggy.PluginManager = field(factory=_manager)

    def discover(self, installed: Sequence[tuple[PluginRecord, EntryPoint]]) -> None:
        """Import the plugins of all installed packages.

        Args:
            installed: as :func:`installed_plugins` returns them.
        """
        for record, entry_point in installed:
            first = self.records.by_name.get(record.name)
            if first is not None:
                self.records.add_duplicate(record, f"the name is taken by the plugin of {first.distribution}")
            elif reason := self._why_skipped(record.name):
                self.records.by_name[record.name] = evolve(record, skipped=reason)
            else:
                self.records.by_name[record.name] = record
                with self._running(record.name):
                    self._add(entry_point.load(), record)

    def add_test_backend(self, name: str) -> None:
        """Register a backend of :mod:`enginehouse_testkit`, which is imported only here."""
        record = PluginRecord(name=name, distribution=_TEST_KIT, version="", hooks=("register_backends",))
        self.records.by_name[f"{name} {record.distribution}"] = record
        module, _, attribute = TEST_BACKENDS[name].partition(":")
        with self.records.recording(f"{name} {record.distribution}"):
            backend = getattr(importlib.import_module(module), attribute)()
            self.registration.register(KINDS["backends"], name, backend)

    def collect(self, kinds: Collection[str] = KINDS) -> None:
        """Call each register hook of each plugin once, and wrap the hooks that are called while the server runs.

        Args:
            kinds: names of the kinds of objects that are used; the hooks of others are left out.
        """
        used = [kind for kind in KINDS.values() if kind.name in kinds]
        collected = [kind for kind in used if kind.wrap is None]
        called: set[tuple[str, str]] = set()
        # The list of a round is fixed: plugins that are added during a round are included in the next one.
        while waiting := [
            (kind, name)
            for kind in collected
            for name, _ in self._manager.list_name_plugin()
            if (kind.name, name) not in called
        ]:
            for kind_name, pairs in itertools.groupby(waiting, key=lambda pair: pair[0].name):
                names = [name for _, name in pairs]
                called.update((kind_name, name) for name in names)
                self._accept(KINDS[kind_name], [offer for name in names for offer in self._call(kind_name, name)])
        for kind in used:
            if kind.wrap is not None:
                for plugin in getattr(self._manager.hook, kind.hook).get_hookimpls():
                    name = plugin.plugin_name
                    self.registration.add(kind, name, name, kind.wrap(name, self._asking(kind.hook, name)))
        self._record_objects()

    def _call(self, kind_name: str, name: str) -> list[_Offer]:
        """Call one hook of one plugin; return what it registers, and record if that is nothing."""
        kind, offers, added = KINDS[kind_name], list[_Offer](), list[str]()
        if kind.hook not in self.records.by_name[name].hooks:
            return offers

        def register(*items: Any) -> None:
            with self.records.recording(name):
                _check_call(kind, items)
                offers.append((name, items))

        def add_plugin(other: str, plugin: object) -> None:
            added.append(other)
            self._add_by_plugin(name, other, plugin)

        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        known_error = self.records.by_name[name].error
        with self._running(name):
            returned = self._manager.subset_hook_caller(kind.hook, remove_plugins=others)(
                register=register, options=self._options[name], add_plugin=add_plugin
            )
            if returned and not offers:
                what = type(returned[0]).__name__
                raise PluginError(f"{kind.hook} registered nothing, but returned a {what}: call register(...) instead")
        if not (offers or added) and self.records.by_name[name].error == known_error:
            self.records.add_note(name, f"{kind.hook} registered nothing")
        return offers

    def _accept(self, kind: Kind, offers: Sequence[_Offer]) -> None:
        """Validate and store the objects of one round. An invalid one is refused; the others of its plugin are kept.

        Of several with one name, Enginehouse's own is stored, else that of the plugin with this name, else the first.
        """
        accept = self.registration.register_function if kind.takes_functions else self.registration.register
        stored = self.registration.objects[kind.name]
        earlier = list(stored)
        for plugin, items in sorted(offers, key=self._rank):
            with self._running(plugin):
                accept(kind, plugin, *items)
        names = dict.fromkeys([*earlier, *map(_name_of, offers)])
        ordered = {name: stored[name] for name in names if name in stored}
        stored.clear()
        stored.update(ordered)

    def _rank(self, offer: _Offer) -> tuple[bool, bool]:
        plugin, _ = offer
        return self.records.by_name[plugin].distribution != _OWN, _name_of(offer) != plugin

    def _record_objects(self) -> None:
        """Store in each record what the plugin brings."""
        for (kind_name, name), plugin in self.registration.owners.items():
            kind, key = KINDS[kind_name], plugin if plugin in self.records.by_name else f"{plugin} {_TEST_KIT}"
            record = self.records.by_name[key]
            is_twin = any(
                other.also is not None and other.also[0] == kind_name and (other.name, name) in self.registration.owners
                for other in KINDS.values()
            )
            if not is_twin:
                brought = kind.noun if kind.wrap is not None else f"{kind.noun} {name}"
                self.records.by_name[key] = evolve(record, brings=(*record.brings, brought))

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[None]:
        """Run code of a plugin: exceptions are recorded, time is counted, standard output goes to standard error.

        Commands write JSON to standard output.
        """
        began = time.perf_counter()
        with _printing, standard_output_as_error(), self.records.recording(name):
            yield
        self.records.add_time(name, time.perf_counter() - began)

    def _asking(self, hook: str, name: str) -> Callable[..., Any]:
        """Return the hook of one plugin as a plain function, with the plugin's options."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        return functools.partial(caller, options=self._options[name])

    def _why_skipped(self, name: str) -> str | None:
        if name in self.settings.deny:
            return "plugins.deny names it"
        if self.settings.allow is not None and name not in self.settings.allow:
            return "plugins.allow does not name it"
        return None

    def _add(self, plugin: object, record: PluginRecord) -> None:
        """Register a plugin: check its hooks and read its options."""
        if self._manager.is_registered(plugin):
            raise PluginError(f"it is the same object as the plugin {self._manager.get_name(plugin)!r}", record.name)
        with contextlib.ExitStack() as undo:
            undo.callback(self._unregister, plugin)
            self._manager.register(plugin, record.name)
            hooks = sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
            self.records.by_name[record.name] = evolve(record, hooks=tuple(hooks))
            self._check_hooks(hooks, plugin)
            self._options[record.name] = self._read_options(plugin, record.name)
            undo.pop_all()

    def _unregister(self, plugin: object) -> None:
        """Undo a registration that may have failed itself."""
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def _add_by_plugin(self, parent: str, name: str, plugin: object) -> None:
        """Register a plugin that another plugin adds; it belongs to the same distribution."""
        if name in self.records.by_name:
            raise PluginError(f"cannot add the plugin {name!r}: the name is taken", parent)
        record = evolve(self.records.by_name[parent], name=name, hooks=(), error=None)
        self.records.by_name[name] = record
        with self._running(name):
            self._add(plugin, record)

    def _check_hooks(self, hooks: Sequence[str], plugin: object) -> None:
        known = tuple(kind.hook for kind in KINDS.values())
        for name in hooks:
            if name not in known:
                raise PluginError(f"unknown hook {name!r}{closest(name, known)}")
        if not hooks:
            raise PluginError("it implements no hook; mark functions with @enginehouse.hookimpl")
        for caller in self._manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    _check_hook(caller.name, implementation)

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
        return structure_options(options_class, data, path, folder=self.settings.folder)


def _check_hook(name: str, implementation: pluggy.HookImpl) -> None:
    """Raise PluginError if calling the function does not run it."""
    if inspect.iscoroutinefunction(implementation.function) or inspect.isasyncgenfunction(implementation.function):
        raise PluginError(f"the hook {name} must be defined with def, not async def")
    if inspect.isgeneratorfunction(implementation.function):
        raise PluginError(f"the hook {name} must not be a generator: remove yield, and call register(...)")


def _check_call(kind: Kind, items: tuple[Any, ...]) -> None:
    """Raise PluginError if ``register`` was called with a wrong number of arguments."""
    wanted, takes = (2, "a name and a function") if kind.takes_functions else (1, "one object")
    if len(items) != wanted:
        raise PluginError(f"register of {kind.hook} takes {takes}; it was called with {len(items)} arguments")


def _name_of(offer: _Offer) -> str:
    """Return the name of the offered object; "" if it has no valid one."""
    _, (first, *_) = offer
    name = first if isinstance(first, str) else getattr(first, "name", "")
    return name if isinstance(name, str) else ""


def _load_order(record: PluginRecord) -> tuple[bool, str, bool, str]:
    plain = re.sub(r"[-_.]+", "-", record.distribution.lower())
    name = record.name.replace("_", "-")
    return record.distribution != _OWN, record.name, plain not in (name, f"{_OWN}-{name}"), record.distribution
