"""Enginehouse: one OpenAI-compatible contract, any inference backend, every stage a plugin."""

from enginehouse.hookspecs import hookimpl

__all__ = ["hookimpl"]
