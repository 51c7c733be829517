"""Rendering of chat messages to prompts: sandboxed templates, and segments that user text cannot escape."""
