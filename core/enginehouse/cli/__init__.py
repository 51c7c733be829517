"""The ``enginehouse`` command."""

from enginehouse.cli.main import main

__all__ = ["main"]
