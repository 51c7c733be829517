"""What the pages on promises and threats claim is shown by tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from .repository import ROOT, syntax_of

PAGES = ("docs/promises.md", "docs/threat-model.md")
_NAMED = re.compile(r"`((?:tests|core/enginehouse_testkit)/[\w/]+\.py)(?:::(\w+))?`")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions in a file, those of classes too."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(syntax_of(ROOT / file)) if isinstance(node, functions))


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    named = _NAMED.findall((ROOT / page).read_text(encoding="utf-8"))

    assert len(named) >= 15
    for file, test in named:
        assert (ROOT / file).is_file(), f"{page} names {file}"
        assert test.startswith("test_") and test in names_in(file), f"{page} names {file}::{test}"


def test_every_promise_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs/promises.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]

    assert len(rows) > 20
    for row in rows[1:]:
        assert _NAMED.search(row.split("|")[3]), row


def test_every_defence_names_what_shows_it() -> None:
    page = (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")
    defences = page.partition("## Defences")[2].partition("## What is not")[0].strip().split("\n\n")

    assert len(defences) > 8
    for defence in defences:
        assert defence.startswith("**")
        assert _NAMED.search(defence), defence.splitlines()[0]
