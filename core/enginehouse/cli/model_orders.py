"""``enginehouse models list|load|unload``: what a running server has loaded, and orders to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.admin_client import ask_server
from enginehouse.cli.options import json_option, server_options
from enginehouse.settings.memory_budget import format_bytes

__all__ = ["list_models", "load", "unload"]


@click.command("list")
@server_options
@json_option
def list_models(url: str, key: str | None, as_json: bool) -> None:
    """List the models of a running server, with what they hold."""
    answer = ask_server(url, key, "GET", "/admin/models")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    table = Table("Name", "State", "Memory", "Running", "Waiting", "Error", box=None, header_style="bold")
    for model in answer["data"]:
        table.add_row(*map(Text, _row(model)))
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


def _row(model: Mapping[str, Any]) -> list[str]:
    memory = model["memory"]
    held = f"{format_bytes(memory['bytes'])} ({memory['device']})" if memory else ""
    state = f"{model['state']}, pinned" if model["pin"] else str(model["state"])
    return [str(model["id"]), state, held, str(model["num_running"]), str(model["num_waiting"]), model["error"] or ""]
