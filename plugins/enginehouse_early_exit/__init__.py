"""Early exit: policies that let confident tokens skip a model's last layers, and their calibration. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.commands import Command
from enginehouse.contract.exit_policy import ExitPolicy
from enginehouse_early_exit.policies import EntropyPolicy, MarginPolicy, SaturationPolicy

__all__ = ["register_commands", "register_exit_policies"]


@hookimpl
def register_exit_policies(register: Callable[[ExitPolicy], None]) -> None:
    """Register the policies; a model uses the one named in its settings."""
    register(MarginPolicy())
    register(EntropyPolicy())
    register(SaturationPolicy())


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register the command; its module is imported when it is run."""
    target = "enginehouse_early_exit.command:calibrate_early_exit"
    register(Command("calibrate early-exit", target, "Measure what leaving a model early costs and gains."))
