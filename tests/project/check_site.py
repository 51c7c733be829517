"""Checks a built documentation site. Run it in the folder ``tests``: ``python -m project.check_site FOLDER``."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path

from sphinx.util.inventory import InventoryFile

from enginehouse import contract

from .repository import ROOT

_CONTRACT = "enginehouse.contract."
# What a browser loads without a click.
_LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//([^"']+)""")
_IMPORTED = re.compile(r"""\b(?:import|from)\b[\s(]*["'](?:https?:)?//([^"']+)""")
_CSS_LOADED = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//([^"')]+)""")


def main(folder: Path) -> None:
    """Exit with a message unless the site is complete and loads nothing from other hosts."""
    problems = [*_missing_pages(folder), *_missing_names(folder), *_foreign(folder)]
    if problems:
        sys.exit("\n".join(problems))


def _missing_pages(folder: Path) -> list[str]:
    return [
        f"no page {page.stem}.html"
        for page in (ROOT / "docs").glob("*.md")
        if not (folder / f"{page.stem}.html").exists()
    ]


def _missing_names(folder: Path) -> list[str]:
    """Public names of the contract that other projects cannot link to."""
    inventory = InventoryFile.loads((folder / "objects.inv").read_bytes(), uri="").data
    known = {name.rpartition(".")[2] for names in inventory.values() for name in names if name.startswith(_CONTRACT)}
    modules = [importlib.import_module(one.name) for one in pkgutil.walk_packages(contract.__path__, _CONTRACT)]
    return [
        f"{module.__name__}.{name} is not in the reference: it needs a docstring"
        for module in modules
        for name in getattr(module, "__all__", ())
        if name not in known
    ]


def _foreign(folder: Path) -> list[str]:
    found = []
    for pattern, suffix in ((_LOADED, "*.html"), (_IMPORTED, "*.html"), (_CSS_LOADED, "*.css")):
        for path in folder.rglob(suffix):
            found += [f"{path.name} loads {host}" for host in pattern.findall(path.read_text(encoding="utf-8"))]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
