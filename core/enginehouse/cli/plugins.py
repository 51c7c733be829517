"""``enginehouse plugins``: installed plugins, what they bring, and their load errors."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.options import config_option, json_option, read_settings
from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRecord, PluginRegistry

_OF_TEST_KIT = {"check": "enginehouse_testkit.plugin_check", "new": "enginehouse_testkit.plugin_skeleton"}
"""Commands for authors of plugins, by their modules in the test kit, which core names but does not import."""


class _Plugins(click.Group):
    """The group, with the commands of the test kit."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, sorted."""
        return sorted(_OF_TEST_KIT)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        if cmd_name not in _OF_TEST_KIT:
            return None
        command: click.Command = getattr(importlib.import_module(_OF_TEST_KIT[cmd_name]), cmd_name)
        return command


@click.group(cls=_Plugins, invoke_without_command=True)
@config_option
@json_option
@click.option("-v", "--verbose", is_flag=True, help="Show the tracebacks of errors, and every plugin's hooks.")
@click.option("--strict", is_flag=True, help="Exit with code 1 if a plugin has an error.")
@click.pass_context
def plugins(ctx: click.Context, config_file: Path | None, *, as_json: bool, verbose: bool, strict: bool) -> None:
    """List the installed plugins with what they bring and their load errors; write a new one, or check one."""
    if ctx.invoked_subcommand is not None:
        return
    settings = read_settings(config_file)
    backends = [model.backend for model in settings.models.values() if model.backend]
    registry = PluginRegistry.survey(settings.plugins, builtin=backends)
    if as_json:
        click.echo(json.dumps([attrs.asdict(record) for record in registry.plugins], indent=2))
    else:
        Console().print(_table(registry))
        for line in _reasons(registry, verbose):
            click.echo(line)
    for line in registry.complaints:
        click.echo(line, err=as_json)
    try:
        registry.check_authenticators(settings.auth.authenticators)
    except ConfigError as error:
        click.echo(error.message, err=as_json)
        ctx.exit(2)
    if registry.wrong_settings:  # the reasons are those of their plugins
        ctx.exit(2)
    ctx.exit(int(strict and any(record.error for record in registry.plugins)))


def _table(registry: PluginRegistry) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("Name", overflow="fold", no_wrap=False)
    for name in ("Distribution", "Version", "Brings"):
        table.add_column(name, overflow="fold")
    table.add_column("Time", justify="right", no_wrap=True)
    table.add_column("State", no_wrap=True)
    for record in registry.plugins:
        time = "" if record.skipped else f"{record.load_s * 1000:.0f} ms"
        cells = (record.name, record.distribution, record.version, "\n".join(record.brings), time, _state(record))
        table.add_row(*map(Text, cells))
    return table


def _state(record: PluginRecord) -> str:
    if record.skipped:
        return "excluded"
    if record.error:
        return "error"
    return "ok" if record.brings else "empty"


def _reasons(registry: PluginRegistry, verbose: bool) -> Iterator[str]:
    """Yield what the table has no room for: reasons of errors, of exclusions, and warnings, each on one line."""
    for record in registry.plugins:
        label = f"{record.name} ({record.distribution})"
        if record.skipped:
            yield f"{label}: not loaded, {record.skipped}"
        if record.problem:
            yield record.problem
        yield from record.warnings
        if verbose and record.hooks:
            yield f"{label}: hooks {', '.join(record.hooks)}"
        if verbose and record.traceback:
            yield record.traceback
