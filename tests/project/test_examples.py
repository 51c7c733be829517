"""Every example runs and prints what its first comment says; those that are clients get a started server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse_testkit.server import started_server

from .repository import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
DOCUMENTED_URL = "http://127.0.0.1:8080"
MAX_LINES = 40
# The starter model's answer, in its own tokens; the empty one ends it.
ANSWER = ["The", " capital", " of", " France", " is", " Paris", ".", ""]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model ``starter`` gives the same answer always."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "answer.json").write_text(json.dumps({"tokens": [{"text": text} for text in ANSWER]}))
    (folder / "enginehouse.toml").write_text("[models.starter]\nsource = 'answer.json'\nbackend = 'scripted'\n")
    with started_server("--config", folder / "enginehouse.toml") as server:
        assert server.url is not None
        yield server.url


def first_comment(source: str) -> tuple[list[str], str]:
    """The commands and the output that an example documents."""
    lines = [line.removeprefix("#").removeprefix(" ") for line in re.match(r"(#.*\n)+", source)[0].splitlines()]  # type: ignore[index]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return commands, "".join(f"{line}\n" for line in lines[len(commands) :])


def test_examples_are_numbered() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_prints_what_it_says(path: Path, url: str) -> None:
    source = path.read_text(encoding="utf-8")
    commands, output = first_comment(source)
    code = source.replace(DOCUMENTED_URL, url)

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert commands[-1] == f"python examples/{path.name}"
    assert len(source.splitlines()) <= MAX_LINES
    assert result.stderr == ""
    assert result.stdout == output
