"""`enginehouse models` and `requests`: models that can be served, and models and requests of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from enginehouse.cli.options import config_option, json_option, read_settings, server_options
from enginehouse.cli.target import ask_server
from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse.plugins import PluginRegistry
from enginehouse.process import standard_output_as_error
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings
from enginehouse.settings.folders import scan_folders
from enginehouse.settings.limits import format_bytes


@click.command("list")
@server_options
@json_option
def list_models(url: str, key: str | None, as_json: bool) -> None:
    """List the models of a running server, with state, memory and number of requests."""
    answer = ask_server(url, key, "GET", "/admin/models")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    table = Table("Name", "State", "Memory", "Running", "Waiting", "Error", box=None, header_style="bold")
    for model in answer["data"]:
        table.add_row(*map(Text, _model_row(model)))
    Console().print(table)
    for device, memory in answer["memory"].items():
        budget = memory["budget_bytes"]
        bound = f" of {format_bytes(budget)}" if budget is not None else ""
        click.echo(f"{device}: {format_bytes(memory['held_bytes'])}{bound}")


@click.command()
@click.argument("model")
@server_options
def load(model: str, url: str, key: str | None) -> None:
    """Load MODEL in a running server, and wait until it is ready."""
    answer = ask_server(url, key, "POST", f"/admin/models/{model}/load", {})
    click.echo(f"{answer['id']} is {answer['state']}")


@click.command()
@click.argument("model")
@click.option("--drain", is_flag=True, help="Let running requests finish first.")
@click.option("--drain-s", type=click.FloatRange(min=0), help="Seconds for that.  [default: the server's]")
@click.option("--force", is_flag=True, help="End running requests, and unload it even if it loads or is pinned.")
@server_options
def unload(*, model: str, drain: bool, drain_s: float | None, force: bool, url: str, key: str | None) -> None:
    """Unload MODEL in a running server, and wait until its memory is free."""
    body = {"drain": drain or drain_s is not None, "force": force, "drain_s": drain_s}
    answer = ask_server(url, key, "POST", f"/admin/models/{model}/unload", body)
    click.echo(f"{answer['id']} is {answer['state']}")


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@config_option
@json_option
def scan(folders: tuple[Path, ...], config_file: Path | None, as_json: bool) -> None:
    """List the models in FOLDERS, or in those of server.models_dir, and the files there that cannot be served."""
    names = folders or tuple(map(Path, read_settings(config_file).server.models_dir))
    if not names:
        raise ConfigError("no folder of models: name one, or set server.models_dir", "server.models_dir")
    found = scan_folders(path.expanduser().absolute() for path in names)
    if as_json:
        models = [{"name": one.name, "path": str(one.path), "aliases": list(one.aliases)} for one in found.models]
        click.echo(json.dumps({"models": models, "unserved": [attrs.asdict(one) for one in found.unserved]}, indent=2))
        return
    table = Table("Name", "Path", "Note", box=None, header_style="bold")
    for model in found.models:
        table.add_row(Text(model.name), Text(str(model.path)), Text(", ".join(model.aliases)))
    for one in found.unserved:
        table.add_row(Text("not served", style="red"), Text(one.path), Text(one.reason))
    Console().print(table)


@click.command()
@click.argument("source")
@click.option("--name", help="Name of the model.  [default: the source's own]")
@click.option("--download", is_flag=True, help="Download its files from the hub if they are missing, and wait for it.")
@server_options
def add(*, source: str, name: str | None, download: bool, url: str, key: str | None) -> None:
    """Serve the model SOURCE in a running server too: a path in its server.models_dir, or the id of a hub."""
    answer = ask_server(url, key, "POST", "/admin/models", {"source": source, "id": name, "download": download})
    _follow_download(answer, url, key)


@click.command()
@click.argument("model")
@server_options
def remove(model: str, url: str, key: str | None) -> None:
    """Stop serving MODEL, which was added to a running server. Its files stay."""
    answer = ask_server(url, key, "DELETE", f"/admin/models/{model}")
    click.echo(f"{answer['id']} is removed")


@click.command()
@click.argument("model")
@click.option("--cancel", is_flag=True, help="Stop its download; data that has arrived is kept.")
@server_options
def download(*, model: str, cancel: bool, url: str, key: str | None) -> None:
    """Download the files of MODEL of a running server, and wait for it; Ctrl-C leaves the server downloading."""
    order = "cancel-download" if cancel else "download"
    _follow_download(ask_server(url, key, "POST", f"/admin/models/{model}/{order}", {}), url, key)


_POLL_S = 0.5


def _follow_download(model: Mapping[str, Any], url: str, key: str | None) -> None:
    """Show the progress of a download as a bar, on a terminal, until it has ended; then the model's state."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"Downloading {model['id']}", total=1.0)
        while model["downloading"]:
            progress.update(bar, completed=model["progress"])
            time.sleep(_POLL_S)
            model = ask_server(url, key, "GET", f"/admin/models/{model['id']}")
    reason = f": {model['error']}" if model["error"] else ""
    click.echo(f"{model['id']} is {model['state']}{reason}")


def _model_row(model: Mapping[str, Any]) -> list[str]:
    memory = model["memory"]
    held = f"{format_bytes(memory['bytes'])} ({memory['device']})" if memory else ""
    state = f"{model['state']}, pinned" if model["pin"] else str(model["state"])
    if (replicas := model.get("replicas")) is not None:
        state += f", {len(replicas)} replica{'s' * (len(replicas) != 1)}"
    return [str(model["id"]), state, held, str(model["num_running"]), str(model["num_waiting"]), model["error"] or ""]


@frozen(kw_only=True)
class _Row:
    """One model that could be served. ``reason`` explains the choice of backend; ``error`` why it cannot be served."""

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


for _command in (list_models, load, unload, scan, add, remove, download):
    models.add_command(_command)


def _list_here(config_file: Path | None, as_json: bool) -> None:
    settings = read_settings(config_file)
    registry = PluginRegistry.for_settings(settings)
    with standard_output_as_error():  # of plugins that are asked about the models
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


@click.group()
def requests() -> None:
    """See and cancel the requests of a running server."""


@requests.command("list")
@server_options
@json_option
def list_requests(url: str, key: str | None, as_json: bool) -> None:
    """List the generating requests that are running, the oldest first."""
    answer = ask_server(url, key, "GET", "/admin/requests")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif not answer["data"]:
        click.echo("Nothing is running.")
    else:
        table = Table("Id", "Key", "Model", "Phase", "Age", "Prompt", "Answer", box=None, header_style="bold")
        for request in answer["data"]:
            table.add_row(*map(Text, _request_row(request)))
        Console().print(table)


@requests.command()
@click.argument("request_id", metavar="ID")
@server_options
def cancel(request_id: str, url: str, key: str | None) -> None:
    """Cancel the request ID; its client gets an error that says so."""
    answer = ask_server(url, key, "POST", f"/admin/requests/{request_id}/cancel")
    click.echo(f"{answer['id']} is cancelled")


def _request_row(request: Mapping[str, Any]) -> list[str]:
    counts = [choice["completion_tokens"] for choice in request["choices"]]
    known = [count for count in counts if count is not None]
    return [
        request["id"],
        request["key"] or "",
        request["model"] or "",
        request["phase"],
        f"{request['age_s']:.1f} s",
        _tokens(request["prompt_tokens"]),
        _tokens(sum(known) if known else None),
    ]


def _tokens(count: int | None) -> str:
    return "" if count is None else f"{count} tokens"
