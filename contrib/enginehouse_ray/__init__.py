"""Plugin ``ray``: places the workers of models on the machines of a Ray cluster. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse.contract.commands import Command
from enginehouse_ray.backend import RayBackend
from enginehouse_ray.options import RayOptions

__all__ = ["options", "register_backends", "register_commands"]

options = RayOptions


@hookimpl
def register_backends(register: Callable[[Backend], None], options: RayOptions) -> None:
    """Register the backend; Ray is imported when a model is placed."""
    register(RayBackend(options))


@hookimpl
def register_commands(register: Callable[[Command], None]) -> None:
    """Register the commands; their module is imported when one is run."""
    register(
        Command(
            "deploy ray", "enginehouse_ray.command:deploy", "Start the replicas of a configuration on a Ray cluster."
        )
    )
    register(
        Command("undeploy ray", "enginehouse_ray.command:undeploy", "Stop the replicas that deploy ray has started.")
    )
