"""A hook ships documented, tested, and with a plugin of ours that uses it."""

from __future__ import annotations

import ast
import inspect

import pytest

from enginehouse import hookspecs
from enginehouse.config import PluginsSettings
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS

from .pages import hook_names
from .repository import ROOT, source_files, syntax_of

every_hook = pytest.mark.parametrize("hook", hook_names())


@every_hook
def test_hooks_docstring_keeps_its_promises(hook: str) -> None:
    docstring = inspect.getdoc(getattr(hookspecs, hook)) or ""

    for part in ("When: ", "once", "process", "thread", "Args:", "An exception ", "Example::"):
        assert part in docstring, f"the docstring of {hook} does not say {part!r}"


def test_every_hook_has_its_kind() -> None:
    assert sorted(kind.hook for kind in KINDS.values()) == sorted(hook_names())


@every_hook
def test_hook_is_documented(hook: str) -> None:
    assert f"### `{hook}`" in (ROOT / "docs" / "plugins.md").read_text()


@every_hook
def test_hook_has_a_test_of_its_name(hook: str) -> None:
    functions = {
        node.name
        for path in source_files("tests/core")
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert f"test_hook_{hook}" in functions


@every_hook
def test_hook_is_used_by_a_first_party_plugin(hook: str) -> None:
    plugins = PluginRegistry.load(PluginsSettings()).plugins

    assert any(hook in record.hooks for record in plugins if record.distribution == "enginehouse")


def test_first_party_plugins_load_without_errors() -> None:
    """They load without their extras too: the library behind a backend is imported on use."""
    problems = [record.problem for record in PluginRegistry.load(PluginsSettings()).plugins if record.problem]

    assert problems == []
