"""Plugin discovery and loading, and typed registries of the objects that plugins register."""

from __future__ import annotations

from enginehouse.plugins.guard import plugin_guard
from enginehouse.plugins.records import PluginRecord
from enginehouse.plugins.registry import PluginRegistry

__all__ = ["PluginRecord", "PluginRegistry", "plugin_guard"]
