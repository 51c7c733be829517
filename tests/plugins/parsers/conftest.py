"""What the tests of the parsers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from enginehouse.pipeline.answer_parser import AnswerParsing

from .answers import cuts, told

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def same_however_cut() -> Callable[[AnswerParsing, str], dict[str, Any]]:
    """Call it with a way of parsing and a text: what the text says, checked over all cuts."""

    def check(parsing: AnswerParsing, text: str) -> dict[str, Any]:
        expected = told(parsing, [text])
        for pieces in cuts(text):
            assert told(parsing, pieces) == expected, pieces
        return expected

    return check
