"""The pages for authors of plugins: complete, short, and with examples that run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from enginehouse import hookimpl
from enginehouse.contract import hookspecs
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.registration import Registration
from enginehouse_testkit.plugin_skeleton import NEW_KINDS, write_plugin

from .pages import TUTORIALS, hook_names
from .plugin_objects import SECTIONS, ContractClass, classes_of, section_of
from .repository import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("plugin*.md"), *DOCS.glob("tutorial-*.md"), DOCS / "first-backend.md"])

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def written_by_hand(page: Path) -> str:
    """A page without its generated parts."""
    return re.sub(
        r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", written_by_hand(page), flags=re.DOTALL | re.MULTILINE)


def interfaces() -> list[Any]:
    """The protocols that authors implement."""
    found = [(module.__name__, one) for _, module in SECTIONS for one in classes_of(module)]
    return [
        pytest.param(one, id=f"{module.rpartition('.')[2]}.{one.name}")
        for module, one in found
        if one.is_protocol and one.methods and not one.is_of_core
    ]


@pytest.mark.parametrize("interface", interfaces())
def test_every_method_says_when_where_and_how_long(interface: ContractClass) -> None:
    methods = {signature.removeprefix("async ").partition("(")[0] for signature, _ in interface.methods}

    assert set(interface.calls) == methods, f"the docstring of {interface.name} needs 'Calls:' with each method"
    for name, parts in interface.calls.items():
        assert len(parts) == 3, f"{interface.name}.{name}: write 'when; process, thread; time', not {parts}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_section_and_a_skeleton(kind: str) -> None:
    assert section_of(kind) in [module for _, module in SECTIONS]
    assert KINDS[kind].noun.replace(" ", "-") in NEW_KINDS


@every_page
def test_page_is_short(page: Path) -> None:
    assert len(written_by_hand(page).splitlines()) <= 200


@every_page
def test_settings_of_the_page_are_toml(page: Path) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


@every_page
def test_commands_of_the_page_exist(page: Path) -> None:
    kinds = re.findall(r"--only ([a-z-]+)", page.read_text(encoding="utf-8"))

    assert set(kinds) <= set(NEW_KINDS)


def examples() -> list[Any]:
    pages = [DOCS / "plugins.md", DOCS / "plugin-fields.md"]
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in pages
        for number, block in enumerate(blocks(page, "python"))
    ]


@pytest.mark.parametrize("example", examples())
def test_example_is_a_plugin_that_registers_something(example: str) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "example", "exec"), names)
    hooks = [name for name in hook_names() if name in names]
    registered: list[Any] = []

    assert hooks
    for hook in hooks:
        arguments = {"register": registered.append, "options": names["options"]() if "options" in names else None}
        wanted = names[hook].__code__.co_varnames[: names[hook].__code__.co_argcount]
        names[hook](**{name: value for name, value in arguments.items() if name in wanted})
        for one in registered:
            Registration().register(next(kind for kind in KINDS.values() if kind.hook == hook), "example", one)
    assert registered


def test_suite_of_the_testing_page_is_what_plugins_new_writes(tmp_path: Path) -> None:
    write_plugin("minimal", tmp_path, "sampler")
    written = (tmp_path / "tests" / "test_minimal.py").read_text(encoding="utf-8")
    suite, _ = blocks(DOCS / "plugin-testing.md", "python")

    assert suite.partition("class ")[2] == written.partition("class ")[2]


def test_server_of_the_testing_page_runs(tmp_path: Path) -> None:
    _, example = blocks(DOCS / "plugin-testing.md", "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "example", "exec"), names)

    names["test_calls_are_found"](tmp_path)


@pytest.mark.parametrize("subject", TUTORIALS)
def test_tutorial_names_its_reference(subject: str) -> None:
    text = (DOCS / f"tutorial-{subject}.md").read_text(encoding="utf-8")

    assert f"--only {TUTORIALS[subject]}" in text
    assert "plugin-objects.md#" in text


def test_first_page_names_every_hook_by_its_kind() -> None:
    """Somebody who looks for a task finds the kind of object for it."""
    text = (DOCS / "plugins.md").read_text(encoding="utf-8").replace("source or hub", "source or a model hub")
    nouns = {kind.noun for kind in KINDS.values()} - {"authenticator", "listener"}

    assert [noun for noun in nouns if noun not in text and noun.replace(" ", "-") not in text] == []
    assert all(callable(getattr(hookspecs, name)) for name in ("authenticate", "on_event"))
    assert callable(hookimpl)
