"""Behaviours of an OpenAI-compatible server, checked over HTTP."""
