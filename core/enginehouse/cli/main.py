"""The command group: finds the commands, and turns our errors into one line and an exit code.

Each command is in a module of its own that is imported when the command is used, so that
``enginehouse --version`` does not wait for the web framework.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginehouse.contract.commands import Command
from enginehouse.contract.errors import ConfigError, EnginehouseError, PluginError
from enginehouse.process import no_collection, prepare_process

if TYPE_CHECKING:
    from enginehouse.plugins import PluginRegistry


_COMMANDS = {
    "docs": "enginehouse.cli.docs:docs",
    "keys": "enginehouse.cli.keys:keys",
    "models": "enginehouse.cli.models:models",
    "plugins": "enginehouse.cli.plugins:plugins",
    "requests": "enginehouse.cli.models:requests",
    "serve": "enginehouse.cli.serve:serve",
}


class _Misuse(click.ClickException):
    """Error that requires changing the command line, the settings or the installation."""

    exit_code = 2


class _Group(click.Group):
    """A click group that imports its commands on use."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run as a program."""
        prepare_process()
        return super().__call__(*arguments, **named)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted; those of plugins are omitted if they cannot be loaded."""
        with contextlib.suppress(EnginehouseError):
            return sorted({*_COMMANDS, *(name.partition(" ")[0] for name in _plugins().commands)})
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of that name. Plugins are consulted only for names that core does not have."""
        if cmd_name in _COMMANDS:
            return _import(_COMMANDS[cmd_name])
        registry = _plugins()
        offered = registry.commands
        if cmd_name in offered:
            return _import_from_plugin(registry, cmd_name)
        members = {name.partition(" ")[2]: one for name, one in offered.items() if name.startswith(f"{cmd_name} ")}
        if not members and cmd_name in registry.absences:
            ctx.fail(f"unknown command {cmd_name!r}: {registry.absences[cmd_name]}")
        return _Members(cmd_name, members, registry) if members else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per command, without importing those of plugins."""
        own = {name: _import(target).get_short_help_str(limit=80) for name, target in _COMMANDS.items()}
        added: dict[str, str] = {}
        with contextlib.suppress(EnginehouseError):  # a wrong setting must not prevent the help
            added = {name: command.summary for name, command in _plugins().commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**own, **added}.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; our errors are meant for users, so they are shown without a traceback."""
        try:
            return super().invoke(ctx)
        except EnginehouseError as error:
            raise _Misuse(error.message) from error


class _Members(click.Group):
    """A group of commands from plugins; a member is imported when it is used."""

    def __init__(self, name: str, members: Mapping[str, Command], registry: PluginRegistry) -> None:
        super().__init__(name, help="; ".join(command.summary.rstrip(".") for command in members.values()) + ".")
        self._members, self._registry = members, registry

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the members, sorted."""
        return sorted(self._members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the member of that name."""
        found = self._members.get(cmd_name)
        return None if found is None else _import_from_plugin(self._registry, found.name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per member, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._members[name].summary) for name in self.list_commands(ctx)])


def _plugins() -> PluginRegistry:
    from enginehouse.cli.options import read_settings  # noqa: PLC0415 - core's own commands need no plugins
    from enginehouse.plugins import PluginRegistry  # noqa: PLC0415
    from enginehouse.settings.config import PluginsSettings  # noqa: PLC0415

    named = os.environ.get("ENGINEHOUSE_CONFIG")
    try:
        settings = read_settings(Path(named) if named else None).plugins
    except ConfigError:  # `doctor` is a command of a plugin, and reports problems of the settings
        settings = PluginsSettings()
    return PluginRegistry.load(settings)


def _import_from_plugin(registry: PluginRegistry, name: str) -> click.Command:
    """Import a command of a plugin.

    Raises:
        PluginFailed: it cannot be imported; the traceback is logged.
    """
    with registry.guard("commands", name).calling("its import"):
        return _import(registry.commands[name].target)


def _import(target: str) -> click.Command:
    module, _, attribute = target.partition(":")
    with no_collection():
        command = getattr(importlib.import_module(module), attribute)
    if not isinstance(command, click.Command):
        raise PluginError(f"{target} is not a click command")
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("enginehouse"), prog_name="enginehouse")
def main() -> None:
    """Serve language models over an OpenAI-compatible API, with any inference backend."""
