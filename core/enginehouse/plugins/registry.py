"""What the rest of core sees of plugins: typed registries, and a record of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from enginehouse.backend import Backend
from enginehouse.commands import Command
from enginehouse.compression import Compressor
from enginehouse.config import PluginsSettings, Settings
from enginehouse.drafting import Drafter
from enginehouse.early_exit import ExitPolicy
from enginehouse.errors import ConfigError
from enginehouse.logits_processor import LogitsProcessor
from enginehouse.parsers import ReasoningParser, ToolParser
from enginehouse.plugins.authenticator import Authenticator
from enginehouse.plugins.loader import TEST_BACKENDS, PluginLoader
from enginehouse.plugins.offers import FindSource
from enginehouse.plugins.records import PluginRecord
from enginehouse.request_fields import RequestField
from enginehouse.router import Router
from enginehouse.sampler import SamplerPlugin
from enginehouse.structured import StructuredDecoder
from enginehouse.structuring import closest

__all__ = ["PluginRegistry"]


@frozen(kw_only=True)
class PluginRegistry:
    """Everything that the loaded plugins offer, by name; read-only.

    Attributes:
        backends: backend by name.
        samplers: sampler by name.
        structured_decoders: decoder by name, in order of preference.
        logits_processors: logits processor by name; ``samplers`` holds each of them as a step, too.
        drafters: drafter by name.
        exit_policies: exit policy by name.
        tool_parsers: tool parser by name, in order of registration.
        reasoning_parsers: reasoning parser by name, in order of registration.
        model_sources: function that finds a model, by the name that users ask for.
        routers: router by name.
        compressors: compressor by name.
        commands: command that a plugin adds to the command line, by name.
        request_fields: field that a plugin added to the request body, by name.
        authenticators: what recognises callers, by the plugin's name; used only where the settings say so.
        listeners: what hears events, by the name of the plugin; called with ``event=``.
        plugins: every installed plugin, loaded or not, in load order.
    """

    backends: Mapping[str, Backend]
    samplers: Mapping[str, SamplerPlugin]
    structured_decoders: Mapping[str, StructuredDecoder]
    logits_processors: Mapping[str, LogitsProcessor]
    drafters: Mapping[str, Drafter]
    tool_parsers: Mapping[str, ToolParser]
    reasoning_parsers: Mapping[str, ReasoningParser]
    model_sources: Mapping[str, FindSource]
    request_fields: Mapping[str, RequestField]
    authenticators: Mapping[str, Authenticator]
    plugins: Sequence[PluginRecord]
    commands: Mapping[str, Command] = MappingProxyType({})
    routers: Mapping[str, Router] = MappingProxyType({})
    compressors: Mapping[str, Compressor] = MappingProxyType({})
    exit_policies: Mapping[str, ExitPolicy] = MappingProxyType({})
    listeners: Mapping[str, Callable[..., object]] = MappingProxyType({})

    @classmethod
    def load(cls, settings: PluginsSettings, builtin: Iterable[str] = ()) -> PluginRegistry:
        """Load every installed plugin that ``settings`` allow.

        Args:
            settings: the allow and deny lists and the plugins' options.
            builtin: backend names in use; those of the test backends ``fake`` and ``scripted`` load these.

        Raises:
            ConfigError: the options of a plugin are wrong.
        """
        loader = PluginLoader(settings)
        loader.discover()
        for name in sorted(set(builtin) & set(TEST_BACKENDS)):
            loader.add_test_backend(name)
        loader.collect()
        offers = loader.offers
        return cls(
            backends=MappingProxyType(offers.backends),
            samplers=MappingProxyType(offers.samplers),
            structured_decoders=MappingProxyType(offers.structured_decoders),
            logits_processors=MappingProxyType(offers.logits_processors),
            drafters=MappingProxyType(offers.drafters),
            exit_policies=MappingProxyType(offers.exit_policies),
            tool_parsers=MappingProxyType(offers.tool_parsers),
            reasoning_parsers=MappingProxyType(offers.reasoning_parsers),
            model_sources=MappingProxyType(offers.model_sources),
            commands=MappingProxyType(offers.commands),
            routers=MappingProxyType(offers.routers),
            compressors=MappingProxyType(offers.compressors),
            request_fields=MappingProxyType(offers.request_fields),
            listeners=MappingProxyType(offers.listeners),
            authenticators=MappingProxyType(offers.authenticators),
            plugins=tuple(loader.records.by_name.values()),
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
        registry.check_authenticators(settings.auth.authenticators)
        return registry

    def check_authenticators(self, names: Iterable[str]) -> None:
        """Raise ConfigError when one of ``names`` is no plugin that recognises callers."""
        for name in names:
            if name not in self.authenticators:
                record = next((record for record in self.plugins if record.name == name), None)
                why = f": {record.error}" if record is not None and record.error else ""
                hint = closest(name, self.authenticators)
                path = "auth.authenticators"
                raise ConfigError(f"{path}: no loaded plugin {name!r} implements authenticate{why}{hint}", path)

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
