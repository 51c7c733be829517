"""The ``enginehouse`` command: starts the server, and manages models, keys, plugins and a server that is running."""

from enginehouse.cli.main import main

__all__ = ["main"]
