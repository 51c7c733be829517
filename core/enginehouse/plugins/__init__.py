"""Installed plugins: found, loaded one by one, and what they hand over sorted into typed registries."""

from __future__ import annotations

from enginehouse.plugins.border import plugin_border
from enginehouse.plugins.records import PluginRecord
from enginehouse.plugins.registry import PluginRegistry

__all__ = ["PluginRecord", "PluginRegistry", "plugin_border"]
