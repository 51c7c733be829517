"""Command ``bench``: measures any OpenAI-compatible server under load. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.commands import Command

__all__ = ["register_commands"]


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register the command; its module is imported when it is run."""
    register(Command("bench", "enginehouse_bench.command:bench", "Measure a running server under load."))
