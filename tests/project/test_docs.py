"""The documents say what the source says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .pages import COMMAND, fill, page_parts
from .repository import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _pages() -> list[Any]:
    """The pages with generated parts; what becomes of constraints depends on the plugin that enforces them."""
    needs = {"docs/api.md": [pytest.mark.llguidance]}
    return [pytest.param(page, marks=needs.get(page, ())) for page in sorted(page_parts())]


@pytest.mark.parametrize("page", _pages())
def test_generated_parts_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")

    assert text == fill(text, page_parts()[page]), f"{page} is out of date; run: {COMMAND}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)

    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("fragment", sorted((ROOT / "changelog.d").glob("*")), ids=lambda path: path.name)
def test_changelog_fragments_have_a_known_type(fragment: Path) -> None:
    assert re.fullmatch(r"[\w+-]+(\.\d+)?\.(added|changed|fixed|removed)\.md|\.gitignore", fragment.name)


def test_sources_name_no_machine() -> None:
    """Nothing that ships depends on where it was written."""
    home = re.compile(r"/(root|home)/\w+")
    shipped = [path for area in ("core", "plugins", "contrib", "examples") for path in (ROOT / area).rglob("*.py")]

    assert [path.name for path in shipped if home.search(path.read_text(encoding="utf-8"))] == []
