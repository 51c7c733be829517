"""Plugin discovery and loading, and typed registries of the objects that plugins register."""

from __future__ import annotations

from enginehouse.plugins.border import plugin_border
from enginehouse.plugins.records import PluginRecord
from enginehouse.plugins.registry import PluginRegistry

__all__ = ["PluginRecord", "PluginRegistry", "plugin_border"]
