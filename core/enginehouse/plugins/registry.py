"""The plugin interface for the rest of core: typed registries, and a load record of each plugin."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.rows import RequestField
from enginehouse.plugins.guard import (
    Guard,
    PluginFailures,
    are_foreign,
    guard_of,
    is_own,
    plain,
)
from enginehouse.plugins.guarded import Authenticator, ProcessorSampler, guarded, guarded_function
from enginehouse.plugins.kinds import KINDS, Kind, PluginObjects
from enginehouse.plugins.loader import TEST_BACKENDS, PluginLoader, installed_plugins, versions_of
from enginehouse.plugins.registration import PluginRecord
from enginehouse.process import no_collection
from enginehouse.settings.config import PluginsSettings, Settings
from enginehouse.settings.structuring import closest

_MAX_SHOWN = 6


@frozen(kw_only=True)
class PluginRegistry(PluginObjects):
    """All objects of the loaded plugins, by name and guarded (see ``guard``); read-only.

    Attributes:
        request_fields: field that a plugin added to the request body, by name.
        plugins: every installed plugin, loaded or not, in load order.
        owners: plugin of each object, by kind and name.
        failures: the failures of these plugins in this process.
        complaints: names in ``[plugins]`` of plugins that are not installed, each as one line.
        wrong_settings: errors in the options of plugins.
        versions: version of each plugin when it was loaded, by its name and distribution.
    """

    request_fields: Mapping[str, RequestField]
    plugins: Sequence[PluginRecord]
    owners: Mapping[tuple[str, str], str] = field(factory=dict)
    failures: PluginFailures = field(factory=PluginFailures)
    complaints: Sequence[str] = ()
    wrong_settings: Sequence[ConfigError] = ()
    versions: Mapping[tuple[str, str], str] = MappingProxyType({})

    def __attrs_post_init__(self) -> None:
        """Guard every object."""
        for kind in KINDS.values():
            objects: Mapping[str, Any] = getattr(self, kind.name)
            of_kind = {name: self._guarded(kind, name, candidate) for name, candidate in objects.items()}
            object.__setattr__(self, kind.name, MappingProxyType(of_kind))

    def _guarded(self, kind: Kind, name: str, candidate: Any) -> Any:
        guard = self.guard(kind.name, name)
        if isinstance(candidate, Authenticator):
            candidate.use_failures(self.failures)
        return guarded_function(candidate, guard) if kind.takes_functions else guarded(candidate, kind.protocol, guard)

    def guard(self, kind: str, name: str) -> Guard:
        """Return the guard of the object of a kind (its name in the table of kinds) with that name."""
        candidate, noun = getattr(self, kind)[name], KINDS[kind].noun
        plugin = self.owners.get((kind, name))
        if plugin is None:
            return guard_of(candidate, noun, name)
        if isinstance(plain(candidate), ProcessorSampler):
            noun = KINDS["logits_processors"].noun
        record = next((one for one in self.plugins if one.name == plugin), None)
        own = is_own(record.distribution) if record is not None else not are_foreign(candidate)
        return Guard.of_plugin(plugin, noun, name, self.failures, is_own=own)

    @cached_property
    def foreign_fields(self) -> Mapping[str, Guard]:
        """Guards of the objects that are not our own, by name of the request fields that they declare."""
        found: dict[str, Guard] = {}
        for name, declared in self.request_fields.items():
            owner = getattr(self, "samplers" if declared.is_sampled else "preparers")[declared.owner]
            if are_foreign(owner):
                found[name] = guard_of(owner, "sampler")
        return MappingProxyType(found)

    @classmethod
    def load(
        cls, settings: PluginsSettings, builtin: Iterable[str] = (), kinds: Collection[str] = KINDS
    ) -> PluginRegistry:
        """Load every installed plugin that ``settings`` allow.

        Args:
            settings: the allow and deny lists and the plugins' options.
            builtin: names of the backends in use; the test backends ``fake`` and ``scripted`` are loaded if among them.
            kinds: names of the kinds of objects that are used; the hooks of others are not called.

        Raises:
            ConfigError: the options of a plugin are invalid.
        """
        registry = cls.survey(settings, builtin, kinds)
        if registry.wrong_settings:
            raise registry.wrong_settings[0]
        return registry

    @classmethod
    def survey(
        cls, settings: PluginsSettings, builtin: Iterable[str] = (), kinds: Collection[str] = KINDS
    ) -> PluginRegistry:
        """Load as :meth:`load` does; invalid options are errors of their plugins, and listed in ``wrong_settings``."""
        loader, installed = PluginLoader(settings), installed_plugins()
        with no_collection():
            loader.discover(installed)
            for name in sorted(set(builtin) & set(TEST_BACKENDS)):
                loader.add_test_backend(name)
            loader.collect(kinds)
        objects: dict[str, Any] = loader.registration.objects
        return cls(
            request_fields=MappingProxyType(loader.registration.request_fields),
            failures=PluginFailures(),
            plugins=tuple(loader.records.by_name.values()),
            owners=MappingProxyType(loader.registration.owners),
            complaints=tuple(_complaints(settings, tuple(record.name for record in loader.records.by_name.values()))),
            wrong_settings=tuple(loader.records.wrong_settings),
            versions=MappingProxyType(versions_of(record for record, _ in installed)),
            **{name: MappingProxyType(by_name) for name, by_name in objects.items()},
        )

    @classmethod
    def for_settings(cls, settings: Settings, also: Iterable[str] = ()) -> PluginRegistry:
        """Load for the server process.

        Args:
            settings: all settings; their models name the backends in use.
            also: names of backends in use that are not in the settings.

        Raises:
            ConfigError: the options of a plugin are invalid, or an authenticator that the settings name is missing.
        """
        models = settings.models.values()
        backends = [name for model in models for name in (model.backend, model.options.get("inner")) if name]
        registry = cls.load(settings.plugins, builtin=[*backends, *also])
        registry.check_authenticators(settings.auth.authenticators)
        registry.failures.max_call_s = settings.limits.plugin_timeout_s
        return registry

    def end_threads(self) -> None:
        """End the threads and event loops of all objects, when no request uses them; called where the server ends."""
        for kind in KINDS.values():
            for candidate in getattr(self, kind.name).values():
                if isinstance(candidate, Authenticator):
                    candidate.end_threads()
                elif are_foreign(candidate):
                    guard_of(candidate, kind.noun).end_threads()

    def check_authenticators(self, names: Iterable[str]) -> None:
        """Raise ConfigError if one of ``names`` is not a plugin that identifies callers."""
        for name in names:
            if name not in self.authenticators:
                path = "auth.authenticators"
                raise ConfigError(f"{path}: {self.missing('authenticator', name, self.authenticators)}", path)

    def missing(self, noun: str, name: str, known: Iterable[str]) -> str:
        """Return a clause that says why an object of a name is missing: for messages to operators.

        Args:
            noun: kind of the object.
            known: names of that kind that exist.
        """
        text = f"unknown {noun} {name!r}"
        if record := next((record for record in self.plugins if record.name == name), None):
            if record.skipped:
                return f"{text}: {self.absences[name]}"
            if record.error:
                return f"{text}: the plugin {name!r} has an error: {record.error}"
            return f"{text}: the plugin {name!r} brings {', '.join(record.brings) or 'nothing'}"
        if hint := closest(name, tuple(known)):
            return text + hint
        if not self.absences:
            return text
        shown, more = list(self.absences)[:_MAX_SHOWN], len(self.absences) - _MAX_SHOWN
        others = f" and {more} more" if more > 0 else ""
        return f"{text}; plugins that are excluded or have errors: {', '.join(shown)}{others}"

    def changes(self) -> tuple[str, ...]:
        """Return the plugins that were installed, removed or given another version since they were loaded.

        The server process continues with the code that it has imported; a new worker imports what is installed now.
        """
        now = versions_of(record for record, _ in installed_plugins())
        changed = sorted(key for key in {*self.versions, *now} if self.versions.get(key) != now.get(key))
        return tuple(
            f"the plugin {name} ({distribution} {self.versions.get((name, distribution), 'not installed')}, "
            f"now {now.get((name, distribution), 'not installed')})"
            for name, distribution in changed
        )

    @cached_property
    def absences(self) -> Mapping[str, str]:
        """Why an installed plugin does not work, as a clause that clients may read, by the plugin's name."""
        found: dict[str, str] = {}
        for record in self.plugins:
            if record.skipped:
                found.setdefault(record.name, f"the plugin {record.name!r} is installed, but {record.skipped}")
            elif record.error:
                found.setdefault(
                    record.name, f"the plugin {record.name!r} has an error; `enginehouse plugins` shows it"
                )
        return MappingProxyType(found)


def _complaints(settings: PluginsSettings, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in the settings that no installed plugin has; one that was uninstalled must not stop a start."""
    for path, names in (
        ("plugins.allow", settings.allow or ()),
        ("plugins.deny", settings.deny),
        ("plugins", settings.options),
    ):
        for name in names:
            if name not in known:
                where = f"plugins.{name}" if path == "plugins" else path
                yield f"{where}: the plugin {name!r} is not installed{closest(name, known)}"
