"""``enginehouse docs``: prints the pages of the documentation."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from enginehouse.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"


def test_a_page_is_printed_as_it_is_written() -> None:
    for name in ("models", "docs/models.md"):
        result = CliRunner().invoke(main, ["docs", name])

        assert (result.exit_code, result.output) == (0, (DOCS / "models.md").read_text(encoding="utf-8"))


def test_all_pages_are_listed_with_their_titles() -> None:
    lines = CliRunner().invoke(main, ["docs"]).output.splitlines()

    assert [line.split()[0] for line in lines] == sorted(path.stem for path in DOCS.glob("*.md"))
    assert all(len(line.split()) > 1 for line in lines)


def test_an_unknown_page_names_the_closest() -> None:
    result = CliRunner().invoke(main, ["docs", "modles"])

    assert result.exit_code == 2
    assert "models" in result.output
