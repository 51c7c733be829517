"""``enginehouse plugins new``: a skeleton of a plugin, with tests that pass.

The files are in ``new_plugin``, and with ``--only`` in ``new_plugin_only``, as those of a plugin named ``minimal``,
which is replaced by the new plugin's name.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import click

from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.settings.config import PluginsSettings

__all__ = ["NEW_KINDS", "new", "write_plugin"]

_FILES = Path(__file__).parent / "new_plugin"
_FILES_ONLY = Path(__file__).parent / "new_plugin_only"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

NEW_KINDS = (*(kind.noun.replace(" ", "-") for kind in KINDS.values()), "engine", "pooler")
"""Values of ``--only``: the kinds of objects, and backends that open an engine or a pooler."""


@click.command()
@click.argument("name")
@click.option("--only", type=click.Choice(NEW_KINDS), metavar="KIND", help=f"One of {', '.join(NEW_KINDS)}.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write it; must not exist yet.  [default: enginehouse-NAME]",
)
def new(name: str, only: str | None, folder: Path | None) -> None:
    """Write an installable plugin NAME with tests that pass.

    It has a backend of about a hundred lines, a sampler and a router; with --only an object of one kind.
    """
    if not _NAME.fullmatch(name):
        raise click.BadParameter("use lower-case words joined by underscores, such as my_engine", param_hint="NAME")
    if problem := _problem_of(name):
        raise click.BadParameter(f"{name}: {problem}; choose another", param_hint="NAME")
    folder = folder or Path(f"enginehouse-{name.replace('_', '-')}")
    if folder.exists():
        raise click.BadParameter(f"{folder} exists already", param_hint="--folder")
    write_plugin(name, folder, only)
    click.echo(f"{folder} holds the plugin {name}. Try it:\n\n  cd {folder}\n  pip install -e '.[test]' && pytest")


def _problem_of(name: str) -> str:
    """Return why no plugin can have this name here; empty if one can."""
    for record in PluginRegistry.load(PluginsSettings(allow=())).plugins:
        if record.name == name:
            return f"the name is taken by the plugin of {record.distribution}, which is installed"
    if importlib.util.find_spec(f"enginehouse_{name}") is not None:
        return f"the package enginehouse_{name} is installed"
    return ""


def write_plugin(name: str, folder: Path, only: str | None = None) -> None:
    """Write the files of a plugin ``name`` into ``folder``; ``only`` is one of :data:`NEW_KINDS`."""
    capitals = "".join(word.capitalize() for word in name.split("_"))
    for target, text in _files() if only is None else _files_only(only):
        file = folder / _renamed(target, name, capitals)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_renamed(text, name, capitals), encoding="utf-8")


def _files() -> Iterator[tuple[str, str]]:
    """Yield path and content of each file."""
    for path in sorted(_FILES.rglob("*.txt")):
        yield path.relative_to(_FILES).with_suffix("").as_posix(), path.read_text(encoding="utf-8")


def _files_only(only: str) -> Iterator[tuple[str, str]]:
    """Yield path and content of each file of a plugin with one object."""
    package, kind = "enginehouse_minimal", only.replace("-", "_")
    for path in sorted(_FILES_ONLY.glob("*.txt")):
        text = path.read_text(encoding="utf-8").replace("a KIND", f"{_article(only)} {only.replace('-', ' ')}")
        yield path.with_suffix("").name, text
    for path in sorted((_FILES_ONLY / kind).rglob("*.txt")):
        place = path.relative_to(_FILES_ONLY / kind).with_suffix("").as_posix()
        place = "tests/test_minimal.py" if place == "test.py" else f"{package}/{place}"
        yield place, path.read_text(encoding="utf-8")
    if only == "backend":
        yield f"{package}/backend.py", (_FILES / package / "backend.py.txt").read_text(encoding="utf-8")


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _renamed(text: str, name: str, capitals: str) -> str:
    dashes = name.replace("_", "-")
    text = text.replace("enginehouse-minimal", f"enginehouse-{dashes}").replace("minimal-", f"{dashes}-")
    return text.replace("minimal", name).replace("Minimal", capitals)
