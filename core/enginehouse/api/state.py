"""What handlers share: one value per server, injected by the app."""

from __future__ import annotations

from attrs import frozen

from enginehouse.api.exchange import OpenExchanges
from enginehouse.config import Settings
from enginehouse.models import ModelManager
from enginehouse.pipeline import Pipeline
from enginehouse.plugins import PluginRegistry

__all__ = ["ApiState"]


@frozen(eq=False, kw_only=True)
class ApiState:
    """The server's parts that handlers use."""

    settings: Settings
    registry: PluginRegistry
    manager: ModelManager
    pipeline: Pipeline
    exchanges: OpenExchanges
