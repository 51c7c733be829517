"""The surface ``anthropic``: Anthropic's Messages API, as Claude Code speaks it. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.surface import Surface

__all__ = ["register_surfaces"]


@hookimpl
def register_surfaces(register: Callable[[Surface], None]) -> None:
    """Register the surface."""
    from enginehouse_anthropic.surface import AnthropicSurface

    register(AnthropicSurface())
