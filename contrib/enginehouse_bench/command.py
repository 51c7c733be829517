"""``enginehouse bench``: measures a running server under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from enginehouse.cli.target import connect
from enginehouse_bench.driving import Run, Served, drive
from enginehouse_bench.embeddings import embeddings
from enginehouse_bench.options import LengthsType, check_is_here
from enginehouse_bench.report import milliseconds, rows, spreads, to_json, to_markdown
from enginehouse_bench.results import Goals, Results, Spread, results_of
from enginehouse_bench.workload import Workload

__all__ = ["bench"]

_MAX_CLIENTS = 1024


@click.group(invoke_without_command=True)
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The server.")
@click.option("--model", help="Model to ask.  [default: the first one listed that can do this]")
@click.option("--key", envvar="ENGINEHOUSE_KEY", help="API key; also the variable ENGINEHOUSE_KEY.")
@click.option("--requests", "num_requests", type=click.IntRange(1, 1_000_000), default=100, show_default=True)
@click.option(
    "--clients",
    type=click.IntRange(1, _MAX_CLIENTS),
    default=8,
    show_default=True,
    help="Requests in flight at once; with --rate the maximum.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests per second at random times, independent of the server's answers.  [default: each client sends its "
    "next request when its last one is answered]",
)
@click.option(
    "--prompt", "prompt_words", type=LengthsType(), default="128", show_default=True,
    help="Words of a prompt, about a token each: 128, 64-512 or normal:256:64.",
)  # fmt: skip
@click.option(
    "--output", "output_tokens", type=LengthsType(), default="64", show_default=True,
    help="Tokens of an answer, in the same forms.",
)  # fmt: skip
@click.option(
    "--shared", "shared_words", type=click.IntRange(0, 1_000_000), default=0, help="Words that all prompts begin with."
)
@click.option(
    "--warmup", type=click.IntRange(0, 1000), default=1, show_default=True, help="Requests before the measurement."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and times.")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds after which the run is cut off.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Longest time of one request in seconds.",
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=JSON",
    help="A further request field; may be repeated, null leaves it out.  [default: ignore_eos=true]",
)
@click.option("--goal-ttft", type=click.FloatRange(0), help="Goodput: longest time to the first token in ms.")
@click.option("--goal-tpot", type=click.FloatRange(0), help="Goodput: longest time per further token in ms.")
@click.option("--goal-latency", type=click.FloatRange(0), help="Goodput: longest time of a whole answer in ms.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all results there.")
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path, dir_okay=False), help="Write tables there."
)
@click.option("--allow-remote", is_flag=True, help="Load a server that is not on this machine.")
@click.pass_context
def bench(ctx: click.Context, **options: Any) -> None:
    """Measure a running OpenAI-compatible server under load.

    Prints times to the first token and between tokens, throughput, and (with goals) goodput. Exit code 1: a request
    failed.
    """
    if ctx.invoked_subcommand is not None:
        return
    url = options["url"]
    check_is_here(url, allow_remote=options["allow_remote"])
    target = connect(url, options["model"], options["key"])
    console = Console()
    workload = _workload(options)
    served = Served(target.url, target.model, options["key"], _fields(options["fields"]))
    _warm_up(served, options)
    run = _drive(served, workload, options, Console(stderr=True))
    goals = Goals(options["goal_ttft"], options["goal_tpot"], options["goal_latency"])
    results = results_of(run, workload.num_requests, goals)
    console.print(Text(f"{target.model} at {target.url}"), soft_wrap=True)
    _show(console, results)
    setting = {"url": target.url, "model": target.model, **_setting(options)}
    for file, text in (
        (options["json_file"], to_json(setting, results)),
        (options["markdown_file"], to_markdown(setting, results)),
    ):
        if file is not None:
            file.write_text(text, encoding="utf-8")
    ctx.exit(1 if results.errors else 0)


def _workload(options: dict[str, Any]) -> Workload:
    return Workload(
        num_requests=options["num_requests"],
        prompt_words=options["prompt_words"],
        output_tokens=options["output_tokens"],
        shared_words=options["shared_words"],
        rate=options["rate"],
        seed=options["seed"],
    )


def _warm_up(served: Served, options: dict[str, Any]) -> None:
    """Send a few uncounted requests; refused requests are detected here, before the load."""
    workload = attrs.evolve(_workload(options), num_requests=max(1, options["warmup"]), rate=None, seed=-1)
    if options["warmup"] == 0:
        return
    run = drive(served, workload, clients=1, limit_s=options["limit_s"], timeout_s=options["timeout_s"])
    failed = next((answer.error for answer in run.answered if answer.error is not None), None)
    if failed is not None:
        raise click.ClickException(f"the server does not serve such requests: {failed}")


def _drive(served: Served, workload: Workload, options: dict[str, Any], console: Console) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring", total=workload.num_requests)
        return drive(
            served,
            workload,
            clients=options["clients"],
            limit_s=options["limit_s"],
            timeout_s=options["timeout_s"],
            on_answer=lambda _: progress.advance(task),
        )


def _show(console: Console, results: Results) -> None:
    counts = Table(box=None, show_header=False)
    for name, value in rows(results):
        counts.add_row(Text(name), Text(value))
    console.print(counts)
    columns = [attribute.name for attribute in attrs.fields(Spread)]
    times = Table("ms", *columns, box=None, header_style="bold")
    for name, spread in spreads(results):
        times.add_row(name, *(milliseconds(getattr(spread, column)) for column in columns))
    console.print(times)


def _fields(texts: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {"ignore_eos": True}
    for text in texts:
        name, sign, value = text.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError as error:
            raise click.UsageError(f"--field {text}: the value must be JSON, such as ignore_eos=true") from error
        if not name or not sign:
            raise click.UsageError(f"--field {text}: write NAME=JSON")
    return {name: value for name, value in fields.items() if value is not None}


def _setting(options: dict[str, Any]) -> dict[str, Any]:
    """Return the benchmark's settings, for the reports."""
    shown = ("num_requests", "clients", "rate", "shared_words", "seed", "goal_ttft", "goal_tpot", "goal_latency")
    lengths = {name: str(options[name]) for name in ("prompt_words", "output_tokens")}
    return {**{name: options[name] for name in shown}, **lengths, "fields": ", ".join(options["fields"])}


bench.add_command(embeddings)
