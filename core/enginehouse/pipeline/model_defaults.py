"""Default parameters of requests to a model, as layers: its alias, its settings, the model's own files.

The pipeline reads the layers for each request; the profile's defaults come after them. Each source is read once: the
configuration tables when the server starts, the model's files when the model has been opened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.parameters import Defaults, Layer, read_defaults
from enginehouse.settings.config import ModelSettings, matches

__all__ = ["ModelDefaults"]

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
