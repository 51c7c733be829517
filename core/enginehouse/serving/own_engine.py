"""Settings that a model cannot follow whose backend opens an engine of its own, such as one behind another server."""

from __future__ import annotations

from attrs import fields

from enginehouse.contract.backend import Backend
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import ModelSettings

__all__ = ["check_own_engine"]

_OF_WORKERS = (
    "prefill_chunk_tokens",
    "prefix_cache",
    "isolation",
    "python",
    "step_timeout_s",
    "replay",
    "replay_timeout_s",
    "drafters",
    "queue_timeout_s",
)
"""Settings about the worker process of a model, the engine in it and its queue."""


def check_own_engine(name: str, settings: ModelSettings, backend: Backend) -> None:
    """Refuse settings about a worker where there is none: nobody would follow them.

    Raises:
        ConfigError: names the first of them.
    """
    if backend.opens != "engine":
        return
    defaults = {attribute.name: attribute.default for attribute in fields(ModelSettings)}
    for setting in _OF_WORKERS:
        if getattr(settings, setting) != defaults[setting]:
            path = f"models.{name}.{setting}"
            reason = f"the backend {backend.name!r} serves this model by an engine of its own; remove this setting"
            raise ConfigError(f"{path}: {reason}", path)
