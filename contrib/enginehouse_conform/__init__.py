"""Command ``conform``: checks any server by OpenAI's, Anthropic's or Ollama's API. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.commands import Command

__all__ = ["register_commands"]


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register the command; its module is imported when it is run."""
    register(
        Command(
            "conform",
            "enginehouse_conform.command:conform",
            "Check whether a server behaves as clients of an API expect.",
        )
    )
