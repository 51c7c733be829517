"""What a new configuration changes about the models, and which settings of one need another worker.

Compares values; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import evolve, frozen

from enginehouse.settings.config import ModelSettings

__all__ = ["ModelChanges", "find_changes", "on_same_worker"]

_WITHOUT_WORKER = frozenset(
    {
        "aliases",
        "alias_defaults",
        "chat_template",
        "defaults",
        "draining",
        "first_token_timeout_s",
        "generation_config",
        "load",
        "load_timeout_s",
        "pin",
        "queue_timeout_s",
        "reasoning_parser",
        "replay",
        "replay_timeout_s",
        "tool_parser",
        "total_timeout_s",
        "ttl",
    }
)
"""Settings that requests and the manager read; all others reach the worker."""


@frozen(kw_only=True)
class ModelChanges:
    """Names of models, each in one of these.

    Attributes:
        replaced: need another worker.
        updated: get other settings while they stay loaded.
        kept: as they were.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def find_changes(old: Mapping[str, ModelSettings], new: Mapping[str, ModelSettings]) -> ModelChanges:
    """What becomes of each model."""
    both = [name for name in new if name in old]
    return ModelChanges(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        replaced=tuple(name for name in both if _needs_worker(old[name], new[name])),
        updated=tuple(name for name in both if old[name] != new[name] and not _needs_worker(old[name], new[name])),
        kept=tuple(name for name in both if old[name] == new[name]),
    )


def on_same_worker(old: ModelSettings, new: ModelSettings) -> ModelSettings:
    """The new settings as far as the worker of the old ones can serve by them."""
    return evolve(old, **{name: getattr(new, name) for name in _WITHOUT_WORKER})


def _needs_worker(old: ModelSettings, new: ModelSettings) -> bool:
    names = [attribute.name for attribute in attrs.fields(ModelSettings) if attribute.name not in _WITHOUT_WORKER]
    return any(getattr(old, name) != getattr(new, name) for name in names)
