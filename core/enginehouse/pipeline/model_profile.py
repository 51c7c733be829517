"""Profile of a loaded model on this server with its plugins and settings, and the default parameters of requests.

Both are created when a model is first requested and kept until it is opened again. The pipeline refuses requests by the
profile, the API shows it. Defaults are layers: those of the alias, of the model's settings, and of its own files.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.capabilities import Capability, Deciders, capabilities_of
from enginehouse.pipeline.chat_formats import ChatFormats, ModelFormats
from enginehouse.pipeline.parameters import Defaults, Layer, read_defaults
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.background import run_with_plugins
from enginehouse.settings.config import ModelSettings, matches

_log = logging.getLogger(__name__)


class ModelDefaults:
    """The defaults of all configured models.

    Args:
        models: model settings by name.
        samplers: plugins whose request fields may have defaults, too.
        absences: why installed plugins do not work, by name.

    Raises:
        ConfigError: a table of defaults contains an unknown request field or a wrong value.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSettings],
        samplers: Mapping[str, SamplerPlugin],
        absences: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._samplers = samplers
        self._absences = absences
        self._reads_files = {name: model.generation_config for name, model in models.items()}
        self._by_settings = {name: self._read(name, model) for name, model in models.items()}
        self._by_files: dict[str, tuple[ModelInfo, tuple[Layer, ...]]] = {}

    def layers(self, model: str, info: ModelInfo, asked: str | None) -> tuple[Layer, ...]:
        """Return the layers for a request, highest priority first.

        Args:
            model: name of the model.
            info: as reported by its backend.
            asked: the name in the request, possibly an alias.
        """
        named = self._by_settings.get(model, {})
        alias = None
        if asked is not None:
            patterns = (layer for pattern, layer in named.items() if pattern is not None and matches(pattern, asked))
            alias = named.get(asked) or next(patterns, None)
        own = named.get(None)
        chosen = tuple(layer for layer in (alias, own) if layer is not None)
        return chosen + self._layers_of_files(model, info)

    def _read(self, name: str, model: ModelSettings) -> dict[str | None, Layer]:
        """Return the layers of the settings: the model's own under None, the others by alias."""
        path = f"models.{name}"
        own = read_defaults(model.defaults, f"{path}.defaults", self._samplers, self._absences)
        layers: dict[str | None, Layer] = {None: Layer("model", own)}
        for alias, table in model.alias_defaults.items():
            read = read_defaults(table, f"{path}.alias_defaults.{alias}", self._samplers, self._absences)
            layers[alias] = Layer("alias", read)
        return layers

    def _layers_of_files(self, model: str, info: ModelInfo) -> tuple[Layer, ...]:
        if not info.generation_defaults or not self._reads_files.get(model, True):
            return ()
        known = self._by_files.get(model)
        if known is None or known[0] is not info:
            read = self._read_leniently(model, info.generation_defaults)
            known = self._by_files[model] = (info, (Layer("generation_config", read),))
        return known[1]

    def _read_leniently(self, model: str, data: Mapping[str, Any]) -> Defaults:
        """Return the defaults of a model's files; unusable entries are skipped, since users cannot fix them."""
        usable: dict[str, Any] = {}
        for name, value in data.items():
            try:
                read_defaults({name: value}, f"generation_config of {model}", self._samplers)
            except ConfigError as error:
                _log.warning("%s; left out", error.message)
            else:
                usable[name] = value
        return read_defaults(usable, f"generation_config of {model}", self._samplers)


@frozen(kw_only=True, eq=False)
class ModelProfile:
    """Profile of one model.

    Attributes:
        formats: the parsers in use for chats.
        capabilities: support level of each parameter.
        template_hash: of all its chat templates, 12 hexadecimal digits.
        quantization: as the backend names it, or the type of its weights; None if both are unknown.
        fingerprint: changes when the same request may get another answer.
    """

    formats: ModelFormats
    capabilities: Mapping[str, Capability]
    template_hash: str
    quantization: str | None
    fingerprint: str


class ModelProfiles:
    """The profiles of all models.

    Args:
        registry: the plugins.
        formats: chooses parsers.
        templates: the chat templates of the models.
    """

    def __init__(self, registry: PluginRegistry, formats: ChatFormats, templates: ModelTemplates) -> None:
        self._registry = registry
        self._formats = formats
        self._templates = templates
        self._plugins = tuple(
            f"{record.name} {record.version}"
            for record in registry.plugins
            if record.error is None and not record.skipped
        )
        self._known: dict[str, tuple[ModelInfo, ModelProfile]] = {}

    def of(self, name: str, info: ModelInfo) -> ModelProfile:
        """Return the profile of a model; ``info`` is that of its last load."""
        known = self._known.get(name)
        if known is None or known[0] is not info:
            known = self._known[name] = (info, self._make(name, info))
        return known[1]

    async def prepare(self, name: str, info: ModelInfo) -> None:
        """Make the profile of a loaded model, off the event loop where parsers are not our own."""
        await run_with_plugins(self._formats.are_foreign, lambda: self.of(name, info))

    def _make(self, name: str, info: ModelInfo) -> ModelProfile:
        templates = self._templates.all(name, info)
        plain, with_tools = (self._templates.choose(name, info, with_tools=tools) for tools in (False, True))
        of_plain, of_tools = (
            self._formats.of(name, ChatFormat(template, info.special_tokens)) for template in (plain, with_tools)
        )
        formats = evolve(of_tools, reasoning=of_plain.reasoning, reasoning_parser=of_plain.reasoning_parser)
        deciders = Deciders(
            info=info,
            formats=formats,
            has_template=plain in templates.values(),
            plugin_fields=self._registry.request_fields,
        )
        written = sorted((templates or {"fallback": plain}).items())
        template_hash = _digest(f"{key}\0{text}" for key, text in written)
        return ModelProfile(
            formats=formats,
            capabilities=capabilities_of(deciders),
            template_hash=template_hash,
            quantization=_quantization(info),
            fingerprint=fingerprint(info, template_hash, self._plugins),
        )


def fingerprint(info: ModelInfo, template_hash: str, plugins: Iterable[str]) -> str:
    """Return a stamp of everything an answer depends on besides the request; the same after a restart.

    The versions of Enginehouse and the backend and the quantisation appear as text; the rest are digests of the model
    with its library, of its chat templates, and of the plugins with their versions.
    """
    model = _digest([str(info.vocab_size), *(f"{name}={value}" for name, value in sorted(info.metadata.items()))])
    parts = (release(), info.backend, _quantization(info) or "", model[:6], template_hash[:6])
    written = [re.sub(r"[^0-9A-Za-z.]+", "_", part).strip("_") for part in parts]
    return "-".join(["eh", *filter(None, written), _digest(sorted(plugins))[:6]])


def _quantization(info: ModelInfo) -> str | None:
    return info.metadata.get("quantization") or info.metadata.get("dtype") or None


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:12]


@functools.cache
def release() -> str:
    """Return this version of Enginehouse."""
    try:
        return version("enginehouse")
    except PackageNotFoundError:  # run from a source tree
        return "0"
