"""Every numbered behaviour (H) and every fault known from other servers (B) has a test that bears its number."""

from __future__ import annotations

import ast

import pytest

from .repository import ROOT, syntax_of

NUMBERS = [f"h{number:02}" for number in range(1, 37)] + [f"b{number:02}" for number in range(1, 21)]


def numbers_of_tests() -> set[str]:
    return {
        node.name.split("_")[1]
        for path in (ROOT / "tests" / "core").rglob("test_*.py")
        for node in syntax_of(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.fixture(scope="module")
def tested() -> set[str]:
    return numbers_of_tests()


@pytest.mark.parametrize("number", NUMBERS)
def test_number_has_a_test(number: str, tested: set[str]) -> None:
    assert number in tested
