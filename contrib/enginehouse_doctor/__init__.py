"""Command ``doctor``: examines the machine, the settings and the models. Hook implementations only."""

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
            "doctor",
            "enginehouse_doctor.command:doctor",
            "Examine this machine, the settings and the models, and say what is wrong.",
        )
    )
