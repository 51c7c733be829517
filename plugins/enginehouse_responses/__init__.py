"""OpenAI's Responses API, as a surface, with a store. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.surface import Surface
from enginehouse_responses.options import ResponsesOptions as options
from enginehouse_responses.surface import ResponsesSurface

__all__ = ["options", "register_surfaces"]


@hookimpl
def register_surfaces(register: Callable[[Surface], None], options: options) -> None:
    """Register the surface."""
    register(ResponsesSurface(options))
