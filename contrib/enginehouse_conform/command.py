"""``enginehouse conform``: checks any server by one of five APIs, and shows a table."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.target import connect
from enginehouse.contract.errors import ConfigError
from enginehouse_conform.catalogue import CHECKS_BY_API
from enginehouse_conform.check import Check, Outcome, Result
from enginehouse_conform.report import summary, to_json, to_markdown
from enginehouse_conform.running import run_checks

__all__ = ["conform"]

_STYLES: dict[Outcome, str] = {"passed": "green", "failed": "bold red", "refused": "yellow", "skipped": "dim"}


@click.command()
@click.argument("url")
@click.option(
    "--api",
    type=click.Choice(tuple(CHECKS_BY_API)),
    default="chat",
    show_default=True,
    help="OpenAI's chats, Responses or embeddings, Anthropic's Messages, or Ollama's API.",
)
@click.option("--model", help="Model to ask.  [default: the first one listed that can do this]")
@click.option("--key", envvar="ENGINEHOUSE_CONFORM_KEY", help="API key; also the variable ENGINEHOUSE_CONFORM_KEY.")
@click.option("--origin", help="A web origin that the server is set up to allow, to check CORS.")
@click.option("--only", "numbers", multiple=True, metavar="H01", help="Check only this behaviour; may be repeated.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Most seconds of one check.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the results there.")
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path, dir_okay=False), help="Write a table there."
)
@click.pass_context
def conform(
    ctx: click.Context,
    *,
    url: str,
    api: str,
    model: str | None,
    key: str | None,
    origin: str | None,
    numbers: tuple[str, ...],
    timeout_s: float,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Check whether the server at URL behaves as clients of an API expect.

    Exit code 1: a check failed. Declared refusals and skipped checks are not failures.
    """
    checks = _chosen(CHECKS_BY_API[api], numbers)
    for file in (json_file, markdown_file):
        if file is not None and not file.absolute().parent.is_dir():  # report the error now instead of after all checks
            raise ConfigError(f"the folder {file.absolute().parent} for {file.name} does not exist")
    target = connect(url, model, key, origin, task="embed" if api == "embeddings" else "generate")
    console = Console()
    console.print(Text(f"{target.url}, model {target.model}: {len(checks)} checks"), soft_wrap=True)
    with console.status("") as status:
        results = list(run_checks(target, checks, timeout_s, lambda check: status.update(Text(_named(check)))))
    console.print(_table(results))
    console.print(Text(summary(results)))
    for file, text in ((json_file, to_json(target, results)), (markdown_file, to_markdown(results))):
        if file is not None:
            file.write_text(text, encoding="utf-8")
    ctx.exit(1 if any(result.outcome == "failed" for result in results) else 0)


def _chosen(checks: tuple[Check, ...], numbers: tuple[str, ...]) -> tuple[Check, ...]:
    known = {check.behaviour for check in checks}
    unknown = [number for number in numbers if number.upper() not in known]
    if unknown:
        raise ConfigError(f"unknown check {unknown[0]!r}; the checks are {', '.join(sorted(known))}")
    wanted = {number.upper() for number in numbers}
    return tuple(check for check in checks if not wanted or check.behaviour in wanted)


def _named(check: Check) -> str:
    return f"{check.behaviour} {check.sentence}"


def _table(results: list[Result]) -> Table:
    table = Table("", "Behaviour", "Result", "Why", box=None, header_style="bold")
    for result in results:
        outcome = Text(result.outcome, style=_STYLES[result.outcome])
        table.add_row(result.behaviour, Text(result.sentence), outcome, Text(result.detail))
    return table
