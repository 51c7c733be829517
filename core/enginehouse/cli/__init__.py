"""The ``enginehouse`` command: reads settings, shows what is there, starts the server."""

from enginehouse.cli.main import main

__all__ = ["main"]
