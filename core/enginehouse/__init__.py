"""Enginehouse: one OpenAI-compatible contract, any inference backend, every stage a plugin."""

import pluggy

__all__ = ["hookimpl"]

hookimpl = pluggy.HookimplMarker("enginehouse")
"""Decorator that marks hook implementations of plugins; defined here so that importing the package stays cheap."""
