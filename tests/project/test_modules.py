"""Every module of ours: small, documented, with an honest `__all__`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .repository import ROOT, source_files, syntax_of

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_module = pytest.mark.parametrize("path", source_files(), ids=identify)


def public_names(tree: ast.Module) -> set[str]:
    """Public names that a module defines (imports do not count)."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def listed_names(tree: ast.Module) -> list[str] | None:
    """The value of `__all__`; None without one."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def place(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def is_plugin_module(path: Path) -> bool:
    """An entry point's module holds hook implementations, which are not imported by name."""
    return path.name == "__init__.py" and path.parent.parent.name in ("plugins", "contrib")


@every_module
def test_all_is_present_sorted_and_complete(path: Path) -> None:
    tree = syntax_of(path)
    listed = listed_names(tree)
    if listed is None and (is_plugin_module(path) or not public_names(tree)):
        return

    assert listed is not None, "__all__ is missing"
    assert listed == sorted(listed, key=place)
    if not is_plugin_module(path):
        assert public_names(tree) <= set(listed), f"not in __all__: {public_names(tree) - set(listed)}"


@every_module
def test_packages_only_re_export(path: Path) -> None:
    if path.name == "__init__.py" and not is_plugin_module(path):
        defined = [node for node in syntax_of(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]

        assert defined == []


@every_module
def test_modules_and_functions_stay_small(path: Path) -> None:
    tree = syntax_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno <= MAX_FUNCTION_LINES, function.name


@every_module
def test_modules_say_what_they_are_for(path: Path) -> None:
    assert len((ast.get_docstring(syntax_of(path)) or "").split()) >= 4


@every_module
def test_no_module_is_a_grab_bag(path: Path) -> None:
    assert path.stem not in ("utils", "common", "helpers", "misc")
