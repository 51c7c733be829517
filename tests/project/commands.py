"""The command line as Markdown, from click's objects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from enginehouse.cli.main import main

__all__ = ["command_pages"]


def command_pages() -> str:
    """One section for each command, those of first-party plugins included."""
    return "\n".join(_sections(main, click.Context(main, info_name="enginehouse", show_default=True)))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    is_group = isinstance(command, click.Group)
    if not is_group or command.invoke_without_command:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"## {context.command_path}\n\n```\n{usage}\n```\n\n{_help(command)}\n"
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        if options:
            yield "| option | |\n|---|---|\n" + "\n".join(_row(option, context) for option in options) + "\n"
    if is_group:
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            yield from _sections(member, click.Context(member, context, info_name=name))


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    return re.sub(r"(?m)^\x08\n", "", text).replace("``", "`").strip()


def _row(option: click.Option, context: click.Context) -> str:
    names, explained = option.get_help_record(context) or ("", "")
    names, explained = (text.replace("|", "\\|").replace("  [", " [") for text in (names, explained))
    return f"| `{names}` | {explained} |"
