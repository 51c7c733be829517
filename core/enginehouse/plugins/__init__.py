"""Plugin discovery and loading, typed registries of what plugins register, and the guards of calls to it."""

from __future__ import annotations

from enginehouse.plugins.guard import Contained, Guard, PluginFailures, are_foreign, guard_of, plain
from enginehouse.plugins.guarded import guarded
from enginehouse.plugins.registration import PluginRecord
from enginehouse.plugins.registry import PluginRegistry

__all__ = [
    "Contained",
    "Guard",
    "PluginFailures",
    "PluginRecord",
    "PluginRegistry",
    "are_foreign",
    "guard_of",
    "guarded",
    "plain",
]
