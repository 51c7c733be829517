"""Routers: choose the model of a request to ``auto`` by rules, load, difficulty, cascade or examples. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.commands import Command
from enginehouse.contract.router import Router
from enginehouse_router.options import RouterOptions as options

__all__ = ["options", "register_commands", "register_routers"]


@hookimpl
def register_routers(register: Callable[[Router], None], options: options) -> None:
    """Register the strategies; ``router.strategy`` selects one."""
    from enginehouse_router.semantic import SemanticRouter
    from enginehouse_router.strategies import CascadeRouter, DifficultyRouter, LoadRouter, RulesRouter

    register(RulesRouter(options))
    register(LoadRouter())
    register(DifficultyRouter(options))
    register(CascadeRouter(options))
    register(SemanticRouter(options))


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register `calibrate router`."""
    register(Command("calibrate router", "enginehouse_router.command:calibrate_router", "Learn weights from a log."))
