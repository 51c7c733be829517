"""The effect of each setting at a reload, as metadata of its attrs field: ``field(default=8, metadata=WORKER)``.

Every setting has one of ``LIVE``, ``WORKER`` and ``SERVER``; some of a model have ``WORKER_ONLY``, too. Reloading, the
checks of models and the tables of docs/configuration.md are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

LIVE = MappingProxyType({"reload": "live"})
"""A new value applies to the next request."""

WORKER = MappingProxyType({"reload": "worker"})
"""A new value reaches the model's worker: the model is loaded anew."""

SERVER = MappingProxyType({"reload": "server"})
"""The old value stays until the server is restarted."""

WORKER_ONLY = MappingProxyType({"worker_only": True})
"""Without effect on, and refused for, models whose backend has an engine of its own."""


def names_with(kind: type[attrs.AttrsInstance], marks: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields whose metadata has all ``marks``."""
    return tuple(field.name for field in attrs.fields(kind) if marks.items() <= field.metadata.items())
