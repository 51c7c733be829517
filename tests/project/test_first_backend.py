"""The page "Your first backend" quotes the example as it is, and what it runs by hand gives what it shows."""

from __future__ import annotations

import doctest
import re
import textwrap

import pytest

from .repository import ROOT

EXAMPLE = ROOT / "examples" / "minimal_plugin"
PAGE = (ROOT / "docs" / "first-backend.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The page's fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("language", ["python", "toml"])
def test_quoted_lines_are_those_of_the_example(language: str) -> None:
    suffix = {"python": "*.py", "toml": "*.toml"}[language]
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLE.rglob(suffix)]

    assert blocks(language)
    for block in blocks(language):
        assert any(block in source for source in sources), f"not in the example:\n{block}"


def test_commands_are_those_of_the_example() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    commands = blocks("bash")[0].splitlines()

    assert commands[:2] == ["enginehouse plugins new minimal", "cd enginehouse-minimal"]
    for command in commands[2:]:
        assert command in readme, f"not in the README of the example: {command}"


def test_calls_by_hand_give_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.chdir(EXAMPLE)
    (session,) = blocks("pycon")
    test = doctest.DocTestParser().get_doctest(textwrap.dedent(session), {}, "first-backend.md", None, 0)
    report: list[str] = []

    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)

    assert result.attempted > 10
    assert result.failed == 0, "".join(report)
