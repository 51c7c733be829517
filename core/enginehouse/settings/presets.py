"""Settings for several models: ``[model_defaults]``, ``[models."pattern*"]``, and the tables of models in folders.

Works on plain data, before ``config`` converts and checks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.folders import Scan, Unserved, scan_folders
from enginehouse.settings.reload import LIVE

__all__ = ["ModelPresets", "add_found", "matches", "take_presets"]

_DEFAULTS = "model_defaults"


def matches(alias: str, name: str) -> bool:
    """Return True if an alias is a pattern and ``name`` one of its names."""
    return "*" in alias and re.fullmatch(".*".join(map(re.escape, alias.split("*"))), name, re.DOTALL) is not None


@frozen(kw_only=True)
class ModelPresets:
    """Tables of settings that apply to several models, and what is in folders but not served.

    Attributes:
        defaults: ``[model_defaults]``, for every model.
        unserved: files in ``server.models_dir`` that are not served.
        patterns: for the models whose names match, in the order of the file; later ones override earlier ones.
    """

    defaults: Mapping[str, Any] = field(factory=dict, metadata=LIVE)
    patterns: Mapping[str, Mapping[str, Any]] = field(factory=dict, metadata=LIVE)
    unserved: tuple[Unserved, ...] = field(default=(), metadata=LIVE)

    def table(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table of a model: ``own`` over the patterns of its name over the defaults."""
        table = _over({}, self.defaults)
        for pattern, preset in self.patterns.items():
            if matches(pattern, name):
                table = _over(table, preset)
        return _over(table, own)


def take_presets(data: dict[str, Any]) -> ModelPresets:
    """Take the presets out of the settings, and apply them to the models that are left.

    Raises:
        ConfigError: a preset is not a table, or names a source.
    """
    defaults = data.pop(_DEFAULTS, {})
    models = data.get("models")
    patterns = {name: table for name, table in models.items() if "*" in name} if isinstance(models, dict) else {}
    for path, table in ((_DEFAULTS, defaults), *((f"models.{name}", table) for name, table in patterns.items())):
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}: must be a table of settings for models", path)
        if "source" in table:
            reason = "applies to several models, so it cannot have a source"
            raise ConfigError(f"{path}.source: {reason}", f"{path}.source")
    presets = ModelPresets(defaults=defaults, patterns=patterns)
    if isinstance(models, dict):
        data["models"] = {
            name: presets.table(name, table) if isinstance(table, Mapping) else table
            for name, table in models.items()
            if name not in patterns
        }
    return presets


def add_found(data: dict[str, Any], folders: list[Path], presets: ModelPresets) -> Scan:
    """Add the models in folders to the settings. A table without a source applies to the found model of its name."""
    models = data.setdefault("models", {})
    if not isinstance(models, dict):
        return Scan()  # the conversion of the settings says what is wrong
    taken = {name for name, table in models.items() if not isinstance(table, Mapping) or "source" in table}
    aliases = (table.get("aliases") for table in models.values() if isinstance(table, Mapping))
    taken.update(alias for names in aliases if isinstance(names, list) for alias in names if isinstance(alias, str))
    scan = scan_folders(folders, taken)
    for model in scan.models:
        found = {"source": str(model.path), "load": "lazy", "aliases": list(model.aliases)}
        models[model.name] = _over(found, presets.table(model.name, models.get(model.name, {})))
    return scan


def _over(table: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``table`` with the keys of ``top``; tables in it are merged, other values replaced."""
    merged = dict(table)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _over(below, value) if both else value  # type: ignore[arg-type]  # checked in ``both``
    return merged
