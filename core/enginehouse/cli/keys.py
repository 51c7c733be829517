"""``enginehouse keys``: makes the lines of a key file."""

from __future__ import annotations

import sys
from typing import get_args

import click

from enginehouse.auth import Scope
from enginehouse.errors import ConfigError
from enginehouse.keys import hash_key, key_line, new_key
from enginehouse.profiles import PROFILES

__all__ = ["keys"]


@click.group()
def keys() -> None:
    """Make entries for the key file (auth.key_file), which holds only hashes."""


@keys.command("hash")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(get_args(Scope)),
    multiple=True,
    default=("infer",),
    show_default=True,
    help="What the key may do; may be given several times.",
)
@click.option("--profile", type=click.Choice(list(PROFILES)), help="API profile of its requests.")
@click.option("--namespace", help="Keys of one namespace share the prefix cache.  [default: one of its own]")
@click.option("--stdin", "reads_stdin", is_flag=True, help="Hash the key that comes on standard input.")
def _hash(name: str, scopes: tuple[str, ...], profile: str | None, namespace: str | None, reads_stdin: bool) -> None:
    """Print a line for the key file: NAME, a hash, and what the key may do.

    A new key is made and shown once, on standard error, so that the line can be appended with >>.
    """
    key = _read_key() if reads_stdin else new_key()
    line = key_line(name, hash_key(key), scopes, profile, namespace)
    if not reads_stdin:
        click.echo(f"The key of {name}, shown only now: {key}", err=True)
    click.echo(line)


def _read_key() -> str:
    """The first line of standard input, never a command line argument, which other users of the machine could see."""
    try:
        return sys.stdin.readline().strip()
    except UnicodeDecodeError as error:
        raise ConfigError("the key on standard input is not UTF-8") from error
