"""Admin API: inspecting and controlling a running server. Every route requires the scope ``admin``."""

from __future__ import annotations

__all__: list[str] = []
