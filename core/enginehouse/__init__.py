"""Enginehouse: one OpenAI-compatible contract, any inference backend, every stage a plugin."""

import pluggy

__all__ = ["hookimpl"]

hookimpl = pluggy.HookimplMarker("enginehouse")
"""Marks a plugin's functions as hook implementations; defined here so that importing the package stays cheap."""
