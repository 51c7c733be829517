"""The ``enginehouse`` command: reads settings, shows models and plugins, starts the server."""

from enginehouse.cli.main import main

__all__ = ["main"]
