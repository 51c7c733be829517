"""Models of the Hugging Face hub, and the command ``pull``. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.commands import Command
from enginehouse.contract.model_hub import ModelHub
from enginehouse_hub.hub import HuggingFaceHub

__all__ = ["register_commands", "register_model_hubs"]


@hookimpl
def register_model_hubs(register: Callable[[ModelHub], None]) -> None:
    """Register the hub; its library is imported on use."""
    register(HuggingFaceHub())


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register the command; its module is imported when it is run."""
    register(Command("pull", "enginehouse_hub.command:pull_command", "Download models from the Hugging Face hub."))
