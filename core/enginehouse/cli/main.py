"""The command group: finds the commands, and turns our errors into one line and an exit code.

Each command lives in a module of its own that is imported when the command is used, so that
``enginehouse --version`` does not wait for the web framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import click

from enginehouse.errors import EnginehouseError

__all__ = ["main"]

_COMMANDS = {
    "chat": "enginehouse.cli.chat:chat",
    "conform": "enginehouse.cli.conform:conform",
    "doctor": "enginehouse.cli.doctor:doctor",
    "keys": "enginehouse.cli.keys:keys",
    "models": "enginehouse.cli.models:models",
    "plugins": "enginehouse.cli.plugins:plugins",
    "pull": "enginehouse.cli.pull:pull_command",
    "serve": "enginehouse.cli.serve:serve",
}


class _Misuse(click.ClickException):
    """The command line, the settings or the installation must be changed first."""

    exit_code = 2


class _Group(click.Group):
    """A group that imports its commands on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, sorted."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is for users, so it is shown without a traceback."""
        try:
            return super().invoke(ctx)
        except EnginehouseError as error:
            raise _Misuse(error.message) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("enginehouse"), prog_name="enginehouse")
def main() -> None:
    """Serve language models over an OpenAI-compatible API, with any inference backend."""
