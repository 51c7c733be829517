"""``enginehouse bench embeddings``: measures embeddings at several loads, each a number of clients and of texts."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec
from attrs import define, field, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.target import connect
from enginehouse_bench.driving import Served
from enginehouse_bench.http import RequestFailed, post
from enginehouse_bench.options import LengthsType, check_is_here
from enginehouse_bench.results import Spread, spread_of
from enginehouse_bench.workload import Lengths, Workload

__all__ = ["Load", "Measured", "embeddings", "measure"]

_COLUMNS = ("load", "requests/s", "texts/s", "tokens/s", "p50 ms", "p90 ms", "p99 ms", "failed")


@frozen
class Load:
    """Clients that each send their next request when their last one is answered.

    Attributes:
        num_clients: requests in flight at once.
        num_texts: texts of each request.
    """

    num_clients: int
    num_texts: int

    def __str__(self) -> str:
        """Format for ``--load``."""
        return f"{self.num_clients}x{self.num_texts}"


@frozen(kw_only=True)
class Measured:
    """Figures of one load.

    Attributes:
        num_tokens: as the server counts them.
        errors: number of requests per reason.
    """

    load: Load
    wall_s: float
    num_requests: int
    num_texts: int
    num_tokens: int
    latency_ms: Spread
    errors: dict[str, int] = field(factory=dict)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    """The members of an answer that are read; vectors are skipped by the decoder."""

    usage: _Usage = msgspec.field(default_factory=_Usage)


_read = msgspec.json.Decoder(_Answer).decode


class _LoadType(click.ParamType):
    name = "load"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Load:
        """Parse ``CLIENTSxTEXTS``."""
        if isinstance(value, Load):
            return value
        found = re.fullmatch(r"(\d{1,4})x(\d{1,5})", value)
        if found is None or not int(found[1]) or not int(found[2]):
            self.fail(f"{value!r} is not a load; write CLIENTSxTEXTS, such as 4x256", param, ctx)
        return Load(int(found[1]), int(found[2]))


def measure(served: Served, load: Load, *, words: Lengths, seconds: float, timeout_s: float, seed: int = 0) -> Measured:
    """Apply one load for a time; requests in flight at its end are awaited and count.

    Args:
        words: of each text; no two texts are alike.
        seconds: after which no further request is sent.
        timeout_s: maximum duration of one request.
    """
    return asyncio.run(_Driver(served, load, timeout_s).run(words, seconds, seed))


@define
class _Driver:
    served: Served
    load: Load
    timeout_s: float
    latencies_ms: list[float] = field(factory=list)
    num_tokens: int = 0
    errors: Counter[str] = field(factory=Counter)

    async def run(self, words: Lengths, seconds: float, seed: int) -> Measured:
        workload = Workload(num_requests=10**12, prompt_words=words, output_tokens=Lengths(1, 1), seed=seed)
        texts = (planned.prompt for planned in workload.requests())
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.num_clients):
                group.create_task(self._client(texts, began_s + seconds))
        return Measured(
            load=self.load,
            wall_s=time.perf_counter() - began_s,
            num_requests=len(self.latencies_ms),
            num_texts=len(self.latencies_ms) * self.load.num_texts,
            num_tokens=self.num_tokens,
            latency_ms=spread_of(self.latencies_ms),
            errors=dict(self.errors.most_common()),
        )

    async def _client(self, texts: Iterator[str], end_s: float) -> None:
        """Send requests until a time, at least one."""
        is_over = False
        while not is_over:
            sent = list(itertools.islice(texts, self.load.num_texts))
            body = json.dumps({"model": self.served.model, "input": sent, **self.served.fields}).encode()
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await post(f"{self.served.url}/embeddings", body, self.served.key)
                self.latencies_ms.append((time.perf_counter() - began_s) * 1000)
                self.num_tokens += _read(answer).usage.prompt_tokens
            except TimeoutError:
                self.errors[f"no answer within {self.timeout_s:g} s"] += 1
            except (RequestFailed, msgspec.MsgspecError) as error:
                self.errors[str(error)] += 1
                return  # a server that refuses is not asked as fast as possible
            is_over = time.perf_counter() >= end_s


@click.command()
@click.argument("url", default="http://127.0.0.1:8080")
@click.option("--model", help="Model to ask.  [default: the first one listed that can do this]")
@click.option("--key", envvar="ENGINEHOUSE_KEY", help="API key; also the variable ENGINEHOUSE_KEY.")
@click.option(
    "--load", "loads", type=_LoadType(), multiple=True, default=("1x1", "16x1", "4x256"), show_default=True,
    help="Clients and texts per request; may be repeated.",
)  # fmt: skip
@click.option(
    "--words", type=LengthsType(), default="16-128", show_default=True,
    help="Words of a text, about a token each: 128, 64-512 or normal:256:64.",
)  # fmt: skip
@click.option("--format", "encoding", type=click.Choice(("base64", "float")), default="base64", show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, help="Time of each load."
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
    help="Longest time of one request in seconds.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the texts.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all results there.")
@click.option("--allow-remote", is_flag=True, help="Load a server that is not on this machine.")
@click.pass_context
def embeddings(ctx: click.Context, *, url: str, loads: tuple[Load, ...], **options: Any) -> None:
    """Measure the embeddings of a running OpenAI-compatible server.

    Each load is applied after one uncounted request. Exit code 1: a request failed.
    """
    check_is_here(url, allow_remote=options["allow_remote"])
    target = connect(url, options["model"], options["key"], task="embed")
    fields = {"encoding_format": options["encoding"]}
    served = Served(target.url, target.model, options["key"], fields)
    console = Console()
    console.print(Text(f"{target.model} at {target.url}"), soft_wrap=True)
    limits = {"words": options["words"], "timeout_s": options["timeout_s"]}
    results = []
    for number, load in enumerate(loads):
        warm_up = measure(served, Load(1, load.num_texts), seconds=0.0, seed=-1 - number, **limits)
        if warm_up.errors:
            raise click.ClickException(f"the server does not serve such requests: {next(iter(warm_up.errors))}")
        results.append(measure(served, load, seconds=options["seconds"], seed=options["seed"] + number, **limits))
    console.print(_table(results))
    for measured in results:
        for reason, count in measured.errors.items():
            console.print(Text(f"{measured.load}: {count} requests failed: {reason}"))
    if options["json_file"] is not None:
        setting = {"url": target.url, "model": target.model, "words": str(options["words"]), **fields}
        figures = [{**attrs.asdict(measured), "load": str(measured.load)} for measured in results]
        options["json_file"].write_text(json.dumps({"setting": setting, "figures": figures}, indent=2) + "\n", "utf-8")
    ctx.exit(1 if any(measured.errors for measured in results) else 0)


def _table(results: list[Measured]) -> Table:
    table = Table(*_COLUMNS, box=None, header_style="bold")
    for one in results:
        rates = (amount / one.wall_s for amount in (one.num_requests, one.num_texts, one.num_tokens))
        times = (one.latency_ms.p50, one.latency_ms.p90, one.latency_ms.p99)
        shown = ["" if value is None else f"{value:.1f}" for value in (*rates, *times)]
        table.add_row(str(one.load), *shown, str(sum(one.errors.values())))
    return table
