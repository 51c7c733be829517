"""``enginehouse requests list|cancel``: the requests of a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.options import json_option, server_options
from enginehouse.cli.target import ask_server


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
            table.add_row(*map(Text, _row(request)))
        Console().print(table)


@requests.command()
@click.argument("request_id", metavar="ID")
@server_options
def cancel(request_id: str, url: str, key: str | None) -> None:
    """Cancel the request ID; its client gets an error that says so."""
    answer = ask_server(url, key, "POST", f"/admin/requests/{request_id}/cancel")
    click.echo(f"{answer['id']} is cancelled")


def _row(request: Mapping[str, Any]) -> list[str]:
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
