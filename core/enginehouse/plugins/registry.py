"""The plugin interface for the rest of core: typed registries, and a load record of each plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.rows import RequestField
from enginehouse.plugins.kinds import PluginObjects
from enginehouse.plugins.loader import TEST_BACKENDS, PluginLoader
from enginehouse.plugins.records import PluginRecord
from enginehouse.settings.config import PluginsSettings, Settings
from enginehouse.settings.structuring import closest

__all__ = ["PluginRegistry"]


@frozen(kw_only=True)
class PluginRegistry(PluginObjects):
    """All objects of the loaded plugins, by name; read-only.

    Attributes:
        request_fields: field that a plugin added to the request body, by name.
        plugins: every installed plugin, loaded or not, in load order.
    """

    request_fields: Mapping[str, RequestField]
    plugins: Sequence[PluginRecord]

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
            plugins=tuple(loader.records.by_name.values()),
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
