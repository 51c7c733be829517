"""What the guard tests know of the repository: folders, pyproject, source files. Imported by its neighbours."""

from __future__ import annotations

import ast
import configparser
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT",
    "imported_modules",
    "plugin_folders",
    "pyproject",
    "source_files",
    "syntax_of",
    "tox_environments",
    "tox_ini",
]

ROOT = Path(__file__).resolve().parents[2]
_AREAS = ("plugins", "contrib")


def pyproject() -> dict[str, Any]:
    """The root pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def tox_ini() -> configparser.ConfigParser:
    """tox.ini, without interpolation."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    return parser


def tox_environments() -> set[str]:
    """Names that sections of tox.ini define, with alternatives such as ``{runners,hf}{,-slow}`` spelt out."""
    names: set[str] = set()
    for section in tox_ini().sections():
        if section.startswith("testenv:"):
            parts = re.findall(r"\{([^}]*)\}|([^{}]+)", section.removeprefix("testenv:"))
            names.update(map("".join, itertools.product(*((many or one).split(",") for many, one in parts))))
    return names


def plugin_folders() -> dict[str, Path]:
    """Import name to folder of every first-party plugin."""
    return {
        folder.name: folder
        for area in _AREAS
        for folder in sorted((ROOT / area).iterdir())
        if folder.name.startswith("enginehouse_")
    }


def source_files(*areas: str) -> list[Path]:
    """Python files below the given folders (core, plugins and contrib without any), sorted in each."""
    return [path for area in areas or ("core", *_AREAS) for path in sorted((ROOT / area).rglob("*.py"))]


def syntax_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Names of all modules that the tree imports absolutely, wherever the import is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
