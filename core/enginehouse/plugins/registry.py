"""The plugin interface for the rest of core: typed registries, and a load record of each plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.logits_processor import ProcessorSampler
from enginehouse.contract.rows import RequestField
from enginehouse.plugins.authenticator import Authenticator
from enginehouse.plugins.guard import Guard, PluginFailures, guard_of, guarded, guarded_function, plain
from enginehouse.plugins.kinds import KINDS, Kind, PluginObjects
from enginehouse.plugins.loader import TEST_BACKENDS, PluginLoader
from enginehouse.plugins.records import PluginRecord
from enginehouse.settings.config import PluginsSettings, Settings
from enginehouse.settings.structuring import closest

__all__ = ["PluginRegistry"]

_OWN = ("enginehouse", "enginehouse_testkit")


@frozen(kw_only=True)
class PluginRegistry(PluginObjects):
    """All objects of the loaded plugins, by name and guarded (see ``guard``); read-only.

    Attributes:
        request_fields: field that a plugin added to the request body, by name.
        plugins: every installed plugin, loaded or not, in load order.
        owners: plugin of each object, by kind and name.
        failures: the failures of these plugins in this process.
    """

    request_fields: Mapping[str, RequestField]
    plugins: Sequence[PluginRecord]
    owners: Mapping[tuple[str, str], str] = field(factory=dict)
    failures: PluginFailures = field(factory=PluginFailures)

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
            return guard_of(candidate, noun)
        if isinstance(plain(candidate), ProcessorSampler):
            noun = KINDS["logits_processors"].noun
        record = next((one for one in self.plugins if one.name == plugin), None)
        is_own = record is None or record.distribution in _OWN
        return Guard(plugin, noun, name, self.failures, is_own)

    @classmethod
    def load(cls, settings: PluginsSettings, builtin: Iterable[str] = ()) -> PluginRegistry:
        """Load every installed plugin that ``settings`` allow.

        Args:
            settings: the allow and deny lists and the plugins' options.
            builtin: names of the backends in use; the test backends ``fake`` and ``scripted`` are loaded if among them.

        Raises:
            ConfigError: the options of a plugin are invalid.
        """
        loader = PluginLoader(settings)
        loader.discover()
        for name in sorted(set(builtin) & set(TEST_BACKENDS)):
            loader.add_test_backend(name)
        loader.collect()
        objects: dict[str, Any] = loader.registration.objects
        return cls(
            request_fields=MappingProxyType(loader.registration.request_fields),
            failures=PluginFailures(),
            plugins=tuple(loader.records.by_name.values()),
            owners=MappingProxyType(loader.registration.owners),
            **{name: MappingProxyType(by_name) for name, by_name in objects.items()},
        )

    @classmethod
    def for_settings(cls, settings: Settings, also: Iterable[str] = ()) -> PluginRegistry:
        """Load for the server process, where every plugin that the settings name must be installed.

        Args:
            settings: all settings; their models name the backends in use.
            also: names of backends in use that are not in the settings.

        Raises:
            ConfigError: ``[plugins]`` names a plugin that is not installed, or its options are invalid.
        """
        backends = [model.backend for model in settings.models.values() if model.backend]
        registry = cls.load(settings.plugins, builtin=[*backends, *also])
        registry.check_names(settings.plugins)
        registry.check_authenticators(settings.auth.authenticators)
        return registry

    def check_authenticators(self, names: Iterable[str]) -> None:
        """Raise ConfigError if one of ``names`` is not a plugin that identifies callers."""
        for name in names:
            if name not in self.authenticators:
                record = next((record for record in self.plugins if record.name == name), None)
                why = f": {record.error}" if record is not None and record.error else ""
                hint = closest(name, self.authenticators)
                path = "auth.authenticators"
                raise ConfigError(f"{path}: no loaded plugin {name!r} implements authenticate{why}{hint}", path)

    def check_names(self, settings: PluginsSettings) -> None:
        """Raise ConfigError if ``settings`` name a plugin that is not installed."""
        known = tuple(record.name for record in self.plugins)
        for path, names in (
            ("plugins.allow", settings.allow or ()),
            ("plugins.deny", settings.deny),
            ("plugins", settings.options),
        ):
            for name in names:
                if name not in known:
                    raise ConfigError(f"{path}: no plugin {name!r} is installed{closest(name, known)}", path)
