"""``enginehouse plugins``: installed plugins, their hooks and their load errors."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.options import config_option, json_option, read_settings
from enginehouse.cli.plugin_check import check
from enginehouse.cli.plugin_skeleton import new
from enginehouse.plugins import PluginRecord, PluginRegistry

__all__ = ["plugins"]


@click.group(invoke_without_command=True)
@config_option
@json_option
@click.pass_context
def plugins(ctx: click.Context, config_file: Path | None, as_json: bool) -> None:
    """List the installed plugins with their hooks and load errors; write a new one, or check one."""
    if ctx.invoked_subcommand is None:
        _list(config_file, as_json)


plugins.add_command(new)
plugins.add_command(check)


def _list(config_file: Path | None, as_json: bool) -> None:
    registry = PluginRegistry.for_settings(read_settings(config_file))
    if as_json:
        click.echo(json.dumps([attrs.asdict(record) for record in registry.plugins], indent=2))
        return
    table = Table("Name", "Distribution", "Version", "Hooks", "State", box=None, header_style="bold")
    for record in registry.plugins:
        cells = (record.name, record.distribution, record.version, "\n".join(record.hooks), _state(record))
        table.add_row(*map(Text, cells))
    Console().print(table)


def _state(record: PluginRecord) -> str:
    if record.skipped:
        return "not loaded: the settings exclude it"
    return f"error: {record.error}" if record.error else "ok"
