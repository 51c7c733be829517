"""The documents say what the source says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .error_codes import HELP, statuses_of_codes
from .pages import COMMAND, fill, page_parts
from .repository import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _pages_with_generated_parts() -> list[Any]:
    """What becomes of constraints depends on the plugin that enforces them, and commands on the hub."""
    needs = {"docs/api.md": [pytest.mark.llguidance], "docs/commands.md": [pytest.mark.llamacpp]}
    found = [path for path in PAGES if "\n<!-- generated: " in path.read_text(encoding="utf-8")]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [pytest.param(name, marks=needs.get(name, ())) for name in names]


@pytest.mark.parametrize("page", _pages_with_generated_parts())
def test_generated_parts_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")

    assert text == fill(text, page_parts()[page]), f"{page} is out of date; run: {COMMAND}"


def test_generated_parts_have_a_page() -> None:
    marked = {values[0] for values, *_ in _pages_with_generated_parts()}

    assert page_parts().keys() <= marked


@pytest.mark.llamacpp
def test_page_of_commands_has_groups_that_do_something_by_themselves() -> None:
    """Such as ``enginehouse bench``, which also has the command ``embeddings``."""
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")

    for name in ("bench", "models", "plugins"):
        assert f"\n## enginehouse {name}\n" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)

    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in _anchors(target), f"{page.name} links to {link}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_error_code_has_a_row_and_no_row_is_without_a_code() -> None:
    assert set(HELP) == set(statuses_of_codes())


def test_architecture_fits_its_size() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_architecture_names_the_packages_and_files_that_exist() -> None:
    core = ROOT / "core" / "enginehouse"
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {folder.name for folder in core.iterdir() if (folder / "__init__.py").exists()}

    assert set(re.findall(r"^\| `(\w+)/` \|", text, flags=re.MULTILINE)) == packages
    for package, rest in re.findall(r"`(\w+)/([\w/.]*)`", text):
        if package in packages:
            assert (core / package / rest).exists(), f"architecture.md names {package}/{rest}"


@pytest.mark.parametrize("fragment", sorted((ROOT / "changelog.d").glob("*")), ids=lambda path: path.name)
def test_changelog_fragments_have_a_known_type(fragment: Path) -> None:
    assert re.fullmatch(r"[\w+-]+(\.\d+)?\.(added|changed|fixed|removed)\.md|\.gitignore", fragment.name)


def test_sources_name_no_machine() -> None:
    """Nothing that ships depends on where it was written."""
    home = re.compile(r"/(root|home)/\w+")
    shipped = [path for area in ("core", "plugins", "contrib", "examples") for path in (ROOT / area).rglob("*.py")]

    assert [path.name for path in shipped if home.search(path.read_text(encoding="utf-8"))] == []


def test_glossary_is_sorted_and_complete() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("# Glossary\n", 1)[1]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "][
        1:
    ]
    words = [row[0].strip("`").casefold() for row in rows]

    assert all(len(row) == 3 and all(row) for row in rows)
    assert words == sorted(set(words))


def test_coming_from_names_settings_that_exist() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\| `(\w+)` \|", configuration, flags=re.MULTILINE))
    named = {
        name.rpartition(".")[2].partition(" ")[0]
        for row in re.findall(r"^\|.*\|(.*)\|$", text, flags=re.MULTILINE)
        for name in re.findall(r"`((?:[a-z]+\.)?[a-z_]+(?: = [^`]+)?)`", row)
    }

    assert len(named) > 25
    assert named - keys - {"remote", "hf", "schema"} == set()
