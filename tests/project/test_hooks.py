"""A hook ships documented, tested, and with a plugin of ours that uses it."""

from __future__ import annotations

import ast
import inspect
from pkgutil import resolve_name

import pytest

from enginehouse.contract import hookspecs
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.settings.config import PluginsSettings

from .pages import hook_names
from .repository import ROOT, source_files, syntax_of

every_hook = pytest.mark.parametrize("hook", hook_names())


CALLED = [kind.hook for kind in KINDS.values() if kind.wrap is not None]
COMMON = ("register", "options", "add_plugin")
"""Arguments that the docstring of the module describes."""


def documented(hook: str) -> str:
    return inspect.getdoc(getattr(hookspecs, hook)) or ""


@pytest.mark.parametrize("docstring", [inspect.getdoc(hookspecs), *map(documented, CALLED)], ids=["register", *CALLED])
def test_docstrings_keep_their_promises(docstring: str) -> None:
    """What the module says of register hooks holds for each of them; a hook that is called later says it itself."""
    for part in ("When: once", "process", "thread", "Args:", "An exception "):
        assert part in docstring, f"the docstring does not say {part!r}"


@every_hook
def test_docstring_says_what_is_the_hooks_own(hook: str) -> None:
    docstring = documented(hook)

    for part in ("An exception ", "Example::"):
        assert part in docstring, f"the docstring of {hook} does not say {part!r}"
    for argument in inspect.signature(getattr(hookspecs, hook)).parameters:
        holds_for_all = argument in COMMON and hook not in CALLED
        assert holds_for_all or f"    {argument}: " in docstring, (
            f"the docstring of {hook} does not describe {argument}"
        )


def test_the_common_arguments_are_described_once() -> None:
    assert all(f"    {argument}: " in (inspect.getdoc(hookspecs) or "") for argument in COMMON)


@every_hook
def test_example_implements_the_hook(hook: str) -> None:
    (function,) = ast.parse(inspect.cleandoc(documented(hook).partition("Example::")[2])).body

    assert isinstance(function, ast.FunctionDef) and function.name == hook
    assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["enginehouse.hookimpl"]
    arguments = {argument.arg for argument in function.args.args}
    assert arguments <= set(inspect.signature(getattr(hookspecs, hook)).parameters)


def test_every_hook_has_its_kind() -> None:
    assert sorted(kind.hook for kind in KINDS.values()) == sorted(hook_names())


def test_every_kind_is_tested_by_suites_that_exist() -> None:
    """And every suite is in the table, but for those that need special models instead of a plugin's object."""
    modules = {path.stem for path in (ROOT / "core/enginehouse_testkit").glob("*_contract.py")}
    suites = [suite for kind in KINDS.values() for suite in kind.suites]

    assert all(isinstance(resolve_name(suite), type) for suite in suites)
    tested = {suite.partition(":")[0].removeprefix("enginehouse_testkit.") for suite in suites}
    special = {"adapter_contract", "depth_contract", "head_contract", "leaving_contract", "media_contract"}
    assert modules - tested == special


@every_hook
def test_hook_is_documented(hook: str) -> None:
    assert f"### `{hook}`" in (ROOT / "docs" / "plugin-hooks.md").read_text()


def test_every_hook_has_a_test_of_its_name() -> None:
    functions = {
        node.name
        for path in source_files("tests/core")
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {f"test_hook_{hook}" for hook in hook_names()} - functions == set()


@every_hook
def test_hook_is_used_by_a_first_party_plugin(hook: str) -> None:
    """Core's own surface is an object of the kind, which needs no hook; the example registers one."""
    plugins = PluginRegistry.load(PluginsSettings()).plugins
    is_used = any(hook in record.hooks for record in plugins if record.distribution == "enginehouse")
    examples = {"register_surfaces": "examples/say_surface/enginehouse_say.py"}

    assert is_used or f"def {hook}(" in (ROOT / examples[hook]).read_text(encoding="utf-8")


def test_first_party_plugins_load_without_errors() -> None:
    """They load without their extras too: the library behind a backend is imported on use."""
    problems = [record.problem for record in PluginRegistry.load(PluginsSettings()).plugins if record.problem]

    assert problems == []
