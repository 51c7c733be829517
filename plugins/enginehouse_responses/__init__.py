"""OpenAI's Responses API, as a surface, with a store. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.hookspecs import AddPlugin
from enginehouse.contract.surface import Surface
from enginehouse_responses.options import ResponsesOptions as options

__all__ = ["options", "register_surfaces"]


@hookimpl
def register_surfaces(register: Callable[[Surface], None], options: options, add_plugin: AddPlugin) -> None:
    """Register the surface; a store is opened and closed with the server."""
    from enginehouse_responses.lifetime import StoreLifetime
    from enginehouse_responses.surface import ResponsesSurface

    surface = ResponsesSurface(options)
    register(surface)
    if surface.store is not None:
        add_plugin("responses-store", StoreLifetime(surface.store))
