"""What the tests of the parsers share."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.pipeline.answer_parser import AnswerParsing

from .answers import cuts, told


@pytest.fixture(scope="session")
def llama_cpp_templates(llama_cpp_archive: Path) -> dict[str, str]:
    """About 70 templates that llama.cpp tests with, by name; read from llama-cpp-python's source archive."""
    found = {}
    with tarfile.open(llama_cpp_archive) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and "templates" in path.parts and (file := archive.extractfile(member)):
                found[path.stem] = file.read().decode()
    assert len(found) >= 40
    return found


@pytest.fixture(scope="session")
def same_however_cut() -> Callable[[AnswerParsing, str], dict[str, Any]]:
    """Call it with a way of parsing and a text: what the text says, checked over all cuts."""

    def check(parsing: AnswerParsing, text: str) -> dict[str, Any]:
        expected = told(parsing, [text])
        for pieces in cuts(text):
            assert told(parsing, pieces) == expected, pieces
        return expected

    return check
