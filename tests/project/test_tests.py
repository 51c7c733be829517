"""Tests stand alone: helpers have modules of their own, and tests use what users of the code may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .repository import ROOT, syntax_of

MODULES = sorted((ROOT / "tests").rglob("*.py"))

PRIVATE = {
    "tests/project/error_codes.py": "reads the errors of core without the arguments that they are raised with",
}
"""Modules that may use private names of other objects, and why."""


def imported_modules_and_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)


def test_test_modules_do_not_import_each_other() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES
        for name in imported_modules_and_names(syntax_of(path))
        if any(part.startswith("test_") for part in name.split("."))
    ]

    assert not found, "helpers belong in harness.py of their folder, or in the test kit"
