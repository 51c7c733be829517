"""``enginehouse models``: what could be served, by which backend, and why; and the models of a running server."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.model_orders import list_models, load, unload
from enginehouse.cli.options import config_option, json_option, read_settings
from enginehouse.contract.errors import EnginehouseError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings

__all__ = ["models"]


@frozen(kw_only=True)
class _Row:
    """One model that could be served. ``reason`` says why this backend; ``error`` why it cannot be served."""

    name: str
    source: str
    configured: bool
    path: str | None = None
    backend: str | None = None
    reason: str = ""
    error: str | None = None


@click.group(invoke_without_command=True)
@config_option
@json_option
@click.pass_context
def models(ctx: click.Context, config_file: Path | None, as_json: bool) -> None:
    """List the configured models and those that plugins offer; with a command, manage those of a running server."""
    if ctx.invoked_subcommand is None:
        _list_here(config_file, as_json)


for _command in (list_models, load, unload):
    models.add_command(_command)


def _list_here(config_file: Path | None, as_json: bool) -> None:
    settings = read_settings(config_file)
    registry = PluginRegistry.for_settings(settings)
    rows = [_describe(name, model, registry, configured=True) for name, model in settings.models.items()]
    rows += [
        _describe(name, ModelSettings(source=name), registry, configured=False)
        for name in registry.model_sources
        if name not in settings.models
    ]
    if as_json:
        click.echo(json.dumps([attrs.asdict(row) for row in rows], indent=2))
    elif not rows:
        click.echo("No model is configured and no plugin offers one.")
    else:
        Console().print(_table(rows))


def _describe(name: str, model: ModelSettings, registry: PluginRegistry, *, configured: bool) -> _Row:
    row = _Row(name=name, source=model.source, configured=configured)
    try:
        plan = plan_model(name, model, registry)
    except EnginehouseError as error:
        return evolve(row, error=error.message)
    path = str(plan.source.path) if plan.source.path else None
    return evolve(row, path=path, backend=plan.backend.name, reason=plan.reason)


def _table(rows: list[_Row]) -> Table:
    table = Table("Name", "Source", "Backend", "Why", box=None, header_style="bold")
    for row in rows:
        source = row.source if row.configured else f"{row.source} (offered by a plugin)"
        why = Text(row.error, style="red") if row.error else Text(row.reason)
        table.add_row(Text(row.name), Text(source), Text(row.backend or "none"), why)
    return table
