"""``enginehouse pull``: downloads a model from the hub, with progress output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.client import HubClient
from enginehouse_hub.listing import HubFile
from enginehouse_hub.pulling import Pulled, pull
from enginehouse_hub.reference import HubReference, parse_reference

__all__ = ["PullProgress", "pull_command"]

_STOPPED = 130
_LINE_S = 5.0


class PullProgress:
    """Shows a download: a progress bar on a terminal, occasional lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._names: list[str] = []
        self._total = self._done = 0
        self._told_s = 0.0

    @property
    def shown(self) -> AbstractContextManager[object]:
        """Context manager that shows the bar."""
        return self._bar if self._console.is_terminal else nullcontext()

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        """Show the total size of the download."""
        self._names = [file.path for file in files]
        self._total, self._done = num_bytes, num_bytes_here
        if num_bytes_here < num_bytes:
            here = f", {decimal(num_bytes_here)} of it is here" if num_bytes_here else ""
            self._say(f"{_count(files)}, {decimal(num_bytes)}{here}")
            self._task = self._bar.add_task("", total=num_bytes, completed=num_bytes_here)

    def file(self, file: HubFile) -> None:
        """Show the file that is being fetched."""
        if self._task is not None:
            self._bar.update(self._task, description=file.path)
        if not self._console.is_terminal:
            self._say(f"fetching {file.path} ({self._names.index(file.path) + 1} of {len(self._names)})")
            self._told_s = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Show the number of bytes received."""
        self._done += num_bytes
        if self._task is not None:
            self._bar.update(self._task, completed=self._done)
        if not self._console.is_terminal and time.monotonic() > self._told_s + _LINE_S:
            self._say(f"{decimal(self._done)} of {decimal(self._total)} ({self._done / max(1, self._total):.0%})")
            self._told_s = time.monotonic()

    def note(self, text: str) -> None:
        """Show another message."""
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@click.command("pull")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--code", is_flag=True, help="Also fetch the Python files of the repository, for trust_remote_code.")
@click.option("--dry-run", is_flag=True, help="Show what the model needs, and fetch nothing.")
@click.pass_context
def pull_command(ctx: click.Context, *, models: tuple[str, ...], code: bool, dry_run: bool) -> None:
    """Download models from the Hugging Face hub.

    MODEL is OWNER/NAME, optionally with :QUANTISATION for one GGUF file (owner/name:Q4_K_M) and @REVISION for a branch,
    tag or commit. Only the missing files that serving needs are fetched. An interrupted download is resumed.
    """
    references = [_reference(text) for text in models]
    console = Console(stderr=True)
    for reference in references:
        progress = PullProgress(console)
        try:
            client = HubClient.from_env()
            with progress.shown:
                pulled = pull(reference, client, progress, code=code, dry_run=dry_run)
        except DownloadError as error:
            raise click.ClickException(error.message) from error
        except KeyboardInterrupt:
            click.echo("\nStopped. The same command continues from here.", err=True)
            ctx.exit(_STOPPED)
        click.echo(_plan(reference, pulled) if dry_run else _outcome(reference, pulled))


def _reference(text: str) -> HubReference:
    reference = parse_reference(text)
    if reference is None:
        raise click.UsageError(f"{text!r} is not a model id; write OWNER/NAME[:QUANTISATION][@REVISION]")
    return reference


def _outcome(reference: HubReference, pulled: Pulled) -> str:
    done = f"fetched {decimal(pulled.num_bytes_fetched)}" if pulled.num_bytes_fetched else "everything was here"
    why = f" ({pulled.note})" if pulled.note else ""
    return (
        f"{reference}: {done}{why}\n"
        f"  commit  {pulled.commit}\n"
        f"  folder  {pulled.folder}\n"
        f"  serve   enginehouse serve {reference}"
    )


def _plan(reference: HubReference, pulled: Pulled) -> str:
    lines = [f"{decimal(file.num_bytes):>10}  {file.path}" for file in pulled.files]
    total = decimal(sum(file.num_bytes for file in pulled.files))
    return "\n".join([f"{reference} at {pulled.commit}", *lines, f"{total:>10}  in {_count(pulled.files)}"])


def _count(files: Sequence[HubFile]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
