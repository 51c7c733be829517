"""The HTTP application without a server and without loaded models, for tests of its routes."""

from __future__ import annotations

from enginehouse.api.http.admission import Admission
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.state import ApiState
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.settings.config import Settings

__all__ = ["make_state"]


def make_state(settings: Settings) -> ApiState:
    """Return what :func:`enginehouse.api.http.app.build_app` needs."""
    registry = PluginRegistry.for_settings(settings)
    manager, renderer = ModelManager(settings, registry), Renderer(1.0, 1000)
    return ApiState(
        settings=settings,
        registry=registry,
        manager=manager,
        pipeline=Pipeline(settings, registry, manager, renderer),
        exchanges=OpenExchanges(),
        keys=KeyStore(settings.auth),
        admission=Admission(settings.limits),
    )
