"""Blocks of the documentation: settings are loaded, commands parsed, requests sent to a server, values read."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

from enginehouse.cli.main import main
from enginehouse.contract.errors import MissingDependency
from enginehouse.settings.config import load_settings
from enginehouse_testkit.server import started_server

from .repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8080(/\S+)")
ELSEWHERE = {
    "docs/models.md": "the administration of that page's models: tests/core/api/admin/test_page.py",
    "/minimal": "an address of the tutorial's plugin: test_plugin_pages.py",
    "minimal_cutoff": "a field of the tutorial's plugin: test_plugin_pages.py",
}
"""Requests that another test sends."""
OTHERS = {
    **dict.fromkeys(("apt", "pip"), "it installs packages"),
    **dict.fromkeys((".", "cd", "echo", "export"), "it changes the reader's shell"),
    **dict.fromkeys(("claude", "docker", "sglang_router"), "a program of another project"),
    **dict.fromkeys(("pytest", "tox"), "it runs tests"),
    "c++": "it compiles another project",
    "python": "scripts of examples/, which tests of their own run, and upstream tools",
}
"""Commands that are not run, and why; a block of nothing else is skipped with these reasons, and so counted."""
SERVER = """
[models.starter]
source = "fake"
backend = "fake"
isolation = "thread"
aliases = ["model", "coder"]
context = 1000

[models.minilm]
source = "fake-pooler"
backend = "fake-pooler"
isolation = "thread"

[models.reranker]
source = "fake-pooler"
backend = "fake-pooler"
task = "rerank"
isolation = "thread"

[models.classifier]
source = "fake-pooler"
backend = "fake-pooler"
task = "classify"
labels = ["bad", "good"]
isolation = "thread"

[plugins.responses]
store = true
"""


def blocks(*languages: str) -> list[Any]:
    """Blocks of these languages in all pages, as parameters."""
    sybil = Sybil([CodeBlockParser(language, lambda example: None) for language in languages])
    return [
        pytest.param(example, id=f"{page.name}:{example.line}")
        for page in PAGES
        for example in sybil.parse(page).examples()
    ]


def commands(example: Example) -> Iterator[list[str]]:
    """Words of each command of a block, without what is shown of its output."""
    text = str(example.parsed).replace("\\\n", " ")
    lines = re.split(r"\n(?=\$ )", text) if text.startswith("$ ") else re.split(r"\n(?![ }])", text)
    for line in lines:
        command = line.removeprefix("$ ")
        if line.startswith("$ "):
            command = command.partition("\n")[0]
        lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if re.fullmatch(r"[|&;]+", word):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a model for every task, under the names that the pages use."""
    file = tmp_path_factory.mktemp("blocks") / "enginehouse.toml"
    file.write_text(SERVER)
    with started_server("--config", file) as server, httpx.Client(base_url=str(server.url), timeout=60) as client:
        yield client


@pytest.mark.parametrize("example", blocks("bash", "console", "sh"))
def test_commands(example: Example, client: httpx.Client) -> None:
    page = str(Path(example.path).relative_to(ROOT))
    is_read, reasons = False, dict[str, str]()
    for command in commands(example):
        words = [word for word in command if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words and words[0] == "enginehouse":
            parse_command(words[1:])
            is_read = True
        elif words and words[0] == "curl":
            if page not in ELSEWHERE and not any(known in " ".join(words) for known in ELSEWHERE):
                send(client, words)
            is_read = True
        elif words:
            assert words[0] in OTHERS, f"{words[0]}: neither run nor known"
            reasons[words[0]] = OTHERS[words[0]]
    if reasons and not is_read:
        pytest.skip("; ".join(f"{name} is not run: {reason}" for name, reason in reasons.items()))


def parse_command(words: list[str]) -> None:
    """Fail if the command line has no such command, argument or option."""
    words = words[: words.index(">")] if ">" in words else words
    command: click.Command = main
    context = click.Context(main, info_name="enginehouse")
    while isinstance(command, click.Group):
        try:
            found = command.get_command(context, words[0]) if words else None
        except MissingDependency as error:  # of the plugin that has the command
            pytest.skip(error.message)
        if found is None:  # such as `enginehouse plugins`, which runs without a member
            assert command.invoke_without_command, words
            return
        command, words = found, words[1:]
        context = click.Context(command, context, info_name=command.name)
    command.make_parser(context).parse_args(args=words)


def send(client: httpx.Client, words: list[str]) -> None:
    """Send a request as curl would; the server must accept it."""
    address = next((found[1] for word in words if (found := ADDRESS.fullmatch(word))), None)
    if address is None:
        assert "--unix-socket" in words, words
        return
    body = words[words.index("-d") + 1] if "-d" in words else None
    response = client.request("GET" if body is None else "POST", address, content=body, headers=headers(words))

    assert response.status_code == 200, response.text


def headers(words: list[str]) -> dict[str, str]:
    """Those of ``-H``."""
    named = [value for option, value in itertools.pairwise(words) if option == "-H"]
    return {"content-type": "application/json", **dict(line.lower().split(": ", 1) for line in named)}


@pytest.mark.parametrize("example", blocks("toml"))
def test_settings_are_loaded(example: Example, tmp_path: Path) -> None:
    """Models that a block leaves out, or leaves without a source, are added."""
    text = str(example.parsed)
    table = tomllib.loads(text)
    if {"project", "model_provider"} & table.keys():
        return  # pyproject.toml, and the settings of Codex
    named = {*table.get("router", {}).get("models", ()), *table.get("models", {})}
    unnamed = {name for name in named if "*" not in name and "source" not in table.get("models", {}).get(name, {})}
    file = tmp_path / "enginehouse.toml"
    file.write_text(text)

    load_settings(file, {}, {"models": {name: {"source": "x"} for name in unnamed}})


@pytest.mark.parametrize("example", blocks("json"))
def test_values_are_json(example: Example) -> None:
    json.loads(re.sub(r", \.\.\.(?=[}\]])", "", str(example.parsed)))


@pytest.mark.parametrize("example", blocks("python"))
def test_code(example: Example, client: httpx.Client) -> None:
    """Clients are run against the server; plugins are run by test_plugin_pages.py and the tutorials' own tests."""
    code = str(example.parsed)
    if "127.0.0.1:8080" in code:
        for name in re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE):
            # Not by importing: a folder of tests may have the name of the package.
            if name not in sys.stdlib_module_names and name not in packages_distributions():
                pytest.skip(f"the package {name} is not installed")
        names: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:8080", str(client.base_url).rstrip("/")), names)
        names["client"].close()
        return
    try:
        ast.parse(code)
    except SyntaxError:  # a part of a class is indented
        ast.parse("async def _():\n" + re.sub("(?m)^", "    ", code))
