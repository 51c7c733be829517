"""``enginehouse keys``: adds keys to the key file, lists and revokes them; the server follows within a second."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import click
from rich import box
from rich.console import Console
from rich.table import Table

from enginehouse.api.http.keys import KeyRecord, add_key, hash_key, key_line, new_key, read_key_file, revoke_key
from enginehouse.cli.options import config_option, json_option, read_settings
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.identity import Scope, read_moment
from enginehouse.settings.profiles import PROFILES

_SPAN = re.compile(r"(\d+)([dh])")


@click.group()
def keys() -> None:
    """Manage the keys of the key file (auth.key_file), which holds only their hashes."""


def _key_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for the permissions of a key, for the commands that create one."""
    for option in reversed(
        (
            click.option(
                "--scope",
                "scopes",
                type=click.Choice(get_args(Scope)),
                multiple=True,
                default=("infer",),
                show_default=True,
                help="What the key may do; may be given several times.",
            ),
            click.option("--profile", type=click.Choice(list(PROFILES)), help="API profile of its requests."),
            click.option("--namespace", help="Keys of one namespace share the prefix cache.  [default: its own]"),
            click.option("--model", "models", multiple=True, help="A model or alias that it may use.  [default: all]"),
            click.option("--rpm", type=click.IntRange(1), help="Requests per minute."),
            click.option("--tpm", type=click.IntRange(1), help="Tokens per minute, prompts and answers together."),
            click.option("--concurrent", type=click.IntRange(1), help="Requests at once."),
            click.option("--priority", type=int, help="Most urgent (lowest) priority it may ask for.  [default: 0]"),
            click.option("--expires", help="When it ends: 2030-01-31, 2030-01-31T12:00:00Z, or from now: 30d, 12h."),
            click.option("--stdin", "reads_stdin", is_flag=True, help="Take the key that comes on standard input."),
        )
    ):
        command = option(command)
    return command


_file_option = click.option(
    "--file",
    "key_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Key file.  [default: auth.key_file]",
)


@keys.command("hash")
@click.argument("name")
@_key_options
def _hash(name: str, **options: Any) -> None:
    """Print a line for the key file: NAME, a hash, and the permissions of the key.

    A new key is generated and shown once, on standard error, so that the line can be appended with >>.
    """
    click.echo(_make(name, options))


@keys.command("add")
@click.argument("name")
@_key_options
@_file_option
@config_option
def _add(name: str, key_file: Path | None, config_file: Path | None, **options: Any) -> None:
    """Add a key for NAME to the key file.

    A new key is generated and shown once, on standard error. The file is created if it does not exist.
    """
    path = _find(key_file, config_file)
    key, new = _given(options), new_key()
    add_key(path, _line(name, new if key is None else key, options))
    if key is None:
        _show(name, new)
    click.echo(f"{name} is in {path}.")


@keys.command("list")
@_file_option
@config_option
@json_option
def _list(key_file: Path | None, config_file: Path | None, as_json: bool) -> None:
    """List the keys of the key file: names and permissions."""
    records = read_key_file(_find(key_file, config_file), may_be_empty=True)
    console = Console()
    rows = [_row(record) for record in records]
    if as_json:
        console.print_json(data=rows)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("name", "scopes", "models", "per minute", "at once", "priority", "profile", "namespace", "expires"):
        table.add_column(title)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


@keys.command("revoke")
@click.argument("name")
@_file_option
@config_option
def _revoke(name: str, key_file: Path | None, config_file: Path | None) -> None:
    """Remove the key of NAME from the key file; a running server refuses it within a second."""
    path = _find(key_file, config_file)
    if not revoke_key(path, name):
        raise click.ClickException(f"{path} holds no key of the name {name!r}")
    click.echo(f"{name} is no longer in {path}.")


def _find(key_file: Path | None, config_file: Path | None) -> Path:
    """Return the key file to use."""
    if key_file is not None:
        return key_file
    found = read_settings(config_file).auth.key_file
    if found is None:
        raise click.UsageError("the configuration has no auth.key_file; name the file with --file")
    return Path(found).expanduser()


def _make(name: str, options: dict[str, Any]) -> str:
    """Return the line for the given key, or for a new one, which is shown."""
    key = _given(options)
    if key is not None:
        return _line(name, key, options)
    key = new_key()
    line = _line(name, key, options)
    _show(name, key)
    return line


def _given(options: dict[str, Any]) -> str | None:
    """Read the key from standard input; never from the command line, which other users of the machine could see."""
    if not options.pop("reads_stdin"):
        return None
    try:
        return sys.stdin.readline().strip()
    except UnicodeDecodeError as error:
        raise ConfigError("the key on standard input is not UTF-8") from error


def _show(name: str, key: str) -> None:
    click.echo(f"The key of {name}, shown only now: {key}", err=True)


def _line(name: str, key: str, options: dict[str, Any]) -> str:
    models = options["models"]
    if any("," in model for model in models):
        raise click.BadParameter("the key file cannot hold names with commas", param_hint="--model")
    counts = {option: str(options[option]) for option in ("rpm", "tpm", "concurrent", "priority") if options[option]}
    return key_line(
        name,
        hash_key(key),
        options["scopes"],
        options["profile"],
        options["namespace"],
        models=",".join(models) or None,
        expires=_moment(options["expires"]),
        **counts,
    )


def _moment(text: str | None) -> str | None:
    """Return a time in the format of the key file, from a time or from a duration from now."""
    if text is None:
        return None
    span = _SPAN.fullmatch(text)
    if span is not None:
        hours = int(span[1]) * (24 if span[2] == "d" else 1)
        try:
            moment = datetime.now(UTC) + timedelta(hours=hours)
        except OverflowError as error:
            raise click.BadParameter(f"{text!r} is too far away", param_hint="--expires") from error
    else:
        try:
            moment = read_moment(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--expires") from error
    return moment.isoformat(timespec="seconds")


def _row(record: KeyRecord) -> dict[str, Any]:
    """Return the displayed fields of a key, without its hash."""
    return {
        "name": record.name,
        "scopes": sorted(record.scopes),
        "models": None if record.models is None else sorted(record.models),
        "requests_per_minute": record.requests_per_minute,
        "tokens_per_minute": record.tokens_per_minute,
        "max_concurrent": record.max_concurrent,
        "priority": record.priority,
        "profile": record.profile,
        "namespace": record.namespace,
        "expires": None if record.expires is None else record.expires.isoformat(),
        "expired": record.is_expired(datetime.now(UTC)),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    limits = [f"{row[name]} {noun}" for name, noun in _LIMITS.items() if row[name] is not None]
    expires = row["expires"] or "never"
    return [
        row["name"],
        ", ".join(row["scopes"]),
        "all" if row["models"] is None else ", ".join(row["models"]),
        ", ".join(limits),
        str(row["max_concurrent"] or ""),
        str(row["priority"]),
        row["profile"] or "",
        row["namespace"],
        f"{expires} (expired)" if row["expired"] else expires,
    ]


_LIMITS = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}
