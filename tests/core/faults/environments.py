"""Virtual environments for workers, made in a moment and without a network.

They have no packages of their own; a ``.pth`` file names the folders that hold them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

__all__ = ["installed_plugin", "make_environment", "packages_of_this_one"]


def packages_of_this_one() -> list[Path]:
    """The folders that hold enginehouse, its plugins, and what they need, however they are installed here."""
    names = ["enginehouse", *{point.value for point in importlib.metadata.entry_points(group="enginehouse")}]
    found = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found.append(Path(next(iter(spec.submodule_search_locations))).parent)
    return list(dict.fromkeys(found))


def make_environment(folder: Path, packages: Iterable[Path]) -> Path:
    """A virtual environment with these folders of packages; returns its Python."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in packages))
    return folder / "bin" / "python"


def installed_plugin(folder: Path, name: str, code: str, version: str = "1.0") -> Path:
    """A folder in which a plugin is installed, as pip would do it."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[enginehouse]\n{name} = {name}\n")
    return folder
