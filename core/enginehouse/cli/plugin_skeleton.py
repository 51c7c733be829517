"""``enginehouse plugins new``: a skeleton of a plugin, with tests that pass.

The files are in ``new_plugin``, as those of a plugin named ``minimal``, which is replaced by the new plugin's name.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

__all__ = ["new", "write_plugin"]

_FILES = Path(__file__).parent / "new_plugin"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.command()
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write it; must not exist yet.  [default: enginehouse-NAME]",
)
def new(name: str, folder: Path | None) -> None:
    """Write an installable plugin NAME: a backend of about a hundred lines, a sampler, a router, tests that pass."""
    if not _NAME.fullmatch(name):
        raise click.BadParameter("use lower-case words joined by underscores, such as my_engine", param_hint="NAME")
    for record in PluginRegistry.load(PluginsSettings(allow=())).plugins:
        if record.name == name:
            message = f"the name is taken by the plugin of {record.distribution}, which is installed; choose another"
            raise click.BadParameter(f"{name}: {message}", param_hint="NAME")
    folder = folder or Path(f"enginehouse-{name.replace('_', '-')}")
    if folder.exists():
        raise click.BadParameter(f"{folder} exists already", param_hint="--folder")
    write_plugin(name, folder)
    click.echo(f"{folder} holds the plugin {name}. Try it:\n\n  cd {folder}\n  pip install -e '.[test]' && pytest")


def write_plugin(name: str, folder: Path) -> None:
    """Write the files of a plugin ``name`` into ``folder``."""
    capitals = "".join(word.capitalize() for word in name.split("_"))
    for path in sorted(_FILES.rglob("*.txt")):
        text = path.read_text(encoding="utf-8")
        target = folder / _renamed(path.relative_to(_FILES).with_suffix("").as_posix(), name, capitals)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_renamed(text, name, capitals), encoding="utf-8")


def _renamed(text: str, name: str, capitals: str) -> str:
    text = text.replace("enginehouse-minimal", f"enginehouse-{name.replace('_', '-')}")
    return text.replace("minimal", name).replace("Minimal", capitals)
