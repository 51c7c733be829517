"""Every module of ours: small and documented; what others may import has an honest `__all__`."""

from __future__ import annotations

import ast
from pathlib import Path

from .repository import ROOT, source_files, syntax_of

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


def is_internal(path: Path) -> bool:
    """A module of core that no plugin imports: its private names begin with an underscore, which says enough."""
    core = ROOT / "core" / "enginehouse"
    return path.is_relative_to(core) and not path.is_relative_to(core / "contract") and path.name != "__init__.py"


def is_plugin_module(path: Path) -> bool:
    """An entry point's module holds hook implementations, which are not imported by name."""
    return path.name == "__init__.py" and path.parent.parent.name in ("plugins", "contrib")


def test_all_is_present_sorted_and_complete() -> None:
    wrong = []
    for path in source_files():
        tree = syntax_of(path)
        listed, public = listed_names(tree), public_names(tree)
        if listed is None:
            is_complete = is_plugin_module(path) or is_internal(path) or not public
        else:
            is_complete = listed == sorted(listed, key=place) and (is_plugin_module(path) or public <= set(listed))
        if not is_complete:
            wrong.append((identify(path), sorted(public - set(listed or ()))))

    assert not wrong, "__all__ is missing, unsorted, or lacks these names"


def test_packages_only_re_export() -> None:
    packages = [path for path in source_files() if path.name == "__init__.py" and not is_plugin_module(path)]
    defined = {
        identify(path): node.name
        for path in packages
        for node in syntax_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }

    assert defined == {}


def test_modules_and_functions_stay_small() -> None:
    functions = {
        f"{identify(path)} {node.name}": (node.end_lineno or 0) - node.lineno
        for path in source_files()
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    modules = {identify(path): len(path.read_text().splitlines()) for path in source_files()}

    assert {name: lines for name, lines in modules.items() if lines > MAX_MODULE_LINES} == {}
    assert {name: lines for name, lines in functions.items() if lines > MAX_FUNCTION_LINES} == {}


def test_modules_say_what_they_are_for() -> None:
    docstrings = {identify(path): ast.get_docstring(syntax_of(path)) or "" for path in source_files()}

    assert [name for name, docstring in docstrings.items() if len(docstring.split()) < 4] == []


def test_no_module_is_a_grab_bag() -> None:
    grab_bags = ("utils", "common", "helpers", "misc")

    assert [identify(path) for path in source_files() if path.stem in grab_bags] == []
