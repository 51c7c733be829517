"""``enginehouse chat``: a conversation in the terminal, or one question through a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from enginehouse.cli.options import config_option, read_settings
from enginehouse.cli.output import write_logs
from enginehouse.cli.target import connect
from enginehouse_chat.conversation import AnswerPart, ChatFailed, Conversation
from enginehouse_chat.slash_commands import HELP, run_command

__all__ = ["chat"]

# A model's output must not move the cursor or recolour the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@click.command()
@click.argument("model", required=False)
@click.option("--url", help="A running server, such as http://127.0.0.1:8080.  [default: one that serves MODEL here]")
@click.option("--key", envvar="ENGINEHOUSE_KEY", help="API key for --url; also the variable ENGINEHOUSE_KEY.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(0), help="Randomness; 0 always takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@config_option
@click.option("--backend", help="Backend that opens MODEL.  [default: the one that suits it best]")
def chat(
    *,
    model: str | None,
    url: str | None,
    key: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    config_file: Path | None,
    backend: str | None,
) -> None:
    """Talk to a model.

    With --url, MODEL is a name on that server (default: its first one). Without, MODEL is a model file or folder, a
    downloaded model or a configured name (default: the first configured one, else the starter model), and is served
    for this command only. Text that is piped in is one question; its answer is all that is written to standard output.
    """
    asked = {"temperature": temperature, "max_tokens": max_tokens}
    fields: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            from enginehouse_chat.own_server import own_server  # noqa: PLC0415 - a whole server, only where one is needed

            write_logs(console, "warning")
            url, model = stack.enter_context(own_server(read_settings(config_file), model, backend, console)), None
        target = connect(url, model, key)
        conversation = Conversation(target.url, target.model, key, system, fields=fields)
        if sys.stdin.isatty():
            _converse(conversation)
        else:
            _answer_once(conversation)


def _answer_once(conversation: Conversation) -> None:
    question = sys.stdin.read().strip()
    if not question:
        raise click.UsageError("the question is missing: standard input is empty")
    try:
        _show(conversation.ask(question), is_terminal=sys.stdout.isatty())
    except ChatFailed as error:
        raise click.ClickException(error.message) from error


def _converse(conversation: Conversation) -> None:
    """Run the question and answer loop until the user leaves."""
    with contextlib.suppress(ImportError):  # not available everywhere; adds line editing and history to input()
        import readline  # noqa: F401, PLC0415
    click.echo(f"{conversation.model} at {conversation.url}. {HELP}")
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:  # discards the current line, as in a shell
            click.echo()
            continue
        except EOFError:
            click.echo()
            return
        if text.startswith("/"):
            outcome = run_command(text, conversation)
            if outcome is None:
                return
            click.echo(outcome)
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    """Show one answer; Ctrl-C stops only the answer."""
    parts = conversation.ask(text)
    try:
        _show(parts, is_terminal=sys.stdout.isatty())
    except KeyboardInterrupt:
        parts.close()
        click.echo(f"{_PLAIN}\n(stopped)")
    except ChatFailed as error:
        click.echo(f"{_PLAIN}({error.message})")


def _show(parts: Iterator[AnswerPart], *, is_terminal: bool) -> None:
    """Write an answer as it arrives; reasoning is dimmed, and omitted without a terminal."""
    shown, usage = "", {}
    for piece in parts:
        if piece.kind == "usage":
            usage = piece.usage
        elif piece.kind == "text" or is_terminal:
            if piece.kind != shown and is_terminal:
                sys.stdout.write(_DIM if piece.kind == "reasoning" else _PLAIN + ("\n\n" if shown else ""))
            shown = piece.kind
            sys.stdout.write(_CONTROLS.sub("", piece.text) if is_terminal else piece.text)
            sys.stdout.flush()
    if is_terminal:
        count = usage.get("completion_tokens")
        sys.stdout.write(f"{_PLAIN}\n" + (f"{_DIM}({count} tokens){_PLAIN}\n" if count else ""))
    else:
        sys.stdout.write("\n")
    sys.stdout.flush()
