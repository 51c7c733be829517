"""`enginehouse docs`: prints a page of the documentation, which the wheel carries as package data."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.markdown import Markdown

import enginehouse
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.structuring import closest

_PACKAGE = Path(enginehouse.__file__).parent
_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs")
"""Folders of the pages: in an installed wheel, and in a checkout."""


def find_pages() -> dict[str, Path]:
    """Return the pages by name; empty if they were not installed."""
    folder = next((folder for folder in _FOLDERS if (folder / "architecture.md").is_file()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.md"))}


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Print PAGE of the documentation, or the names of all pages. On a terminal it is formatted, else as written."""
    pages = find_pages()
    if page is None:
        for name, path in pages.items():
            click.echo(f"{name:<22}{path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise ConfigError(f"no page {page!r}{closest(name, tuple(pages))}; enginehouse docs lists them")
    text = pages[name].read_text(encoding="utf-8")
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        click.echo(text, nl=False)
