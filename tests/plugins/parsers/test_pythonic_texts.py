"""Text arguments of the parser ``pythonic``: given while they arrive, and equal to Python's or JSON's reading."""

from __future__ import annotations

import ast
import json

import pytest

from enginehouse.contract.parsers import CallArguments
from enginehouse_testkit.contract.parser_driver import said_by

from .answers import FORMATS, SAY

LITERALS = [
    "''",
    '""',
    "'plain'",
    "\"say 'hi'\"",
    "'a \"b\" c'",
    r"'line\nbreak\ttab\\ \' \" \a\v\0'",
    r"'\x41\u00e9\U0001f642\101\N{BULLET}'",
    r"'C:\data \d \N{no such} \N'",
    "'''three quotes'''",
    "'one' 'two'",
    "'one'  \"two\"",
    "u'prefix'",
    "'Größe 🙂'",
    "'comma, (paren) [x]'",
]
"""Read as Python does."""

JSON_LITERALS = [r'"a\/b"', r'"\ud83d\ude42"', r'"\u00e9 \"x\""']


def arguments_of(value: str, pieces: list[str]) -> str:
    said = said_by(FORMATS["pythonic"].open((SAY,)), pieces)
    assert [name for name, _ in said.calls] == ["say"], said
    return said.calls[0][1]


def check(literal: str, expected: object) -> None:
    text = f"[say(text={literal}, n=1)]"
    whole = arguments_of(literal, [text])

    assert json.loads(whole) == {"text": expected, "n": 1}
    assert arguments_of(literal, list(text)) == whole
    for cut in range(1, len(text)):
        assert arguments_of(literal, [text[:cut], text[cut:]]) == whole, text[:cut]


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_python_texts(literal: str) -> None:
    if "no such" in literal:  # Python refuses unknown names; they are kept
        return check(literal, r"C:\data \d \N{no such} \N")
    check(literal, ast.literal_eval(literal))


@pytest.mark.parametrize("literal", JSON_LITERALS)
def test_json_texts(literal: str) -> None:
    check(literal, json.loads(literal))


@pytest.mark.parametrize(("literal", "shown"), [(r"'\ud83d'", "?"), (r"'\ude42 x'", "? x"), (r"'\ud83d\u0041'", "?A")])
def test_half_of_a_surrogate_pair_is_replaced(literal: str, shown: str) -> None:
    check(literal, shown)


@pytest.mark.parametrize("text", ["'a' + 'b'", "'a'.upper()", "'a' x"])
def test_what_follows_a_text_that_is_no_literal_belongs_to_it(text: str) -> None:
    call = f"[say(text={text})]"
    whole = arguments_of(text, [call])

    assert json.loads(whole)["text"].startswith("a'")
    assert arguments_of(text, list(call)) == whole


def test_pieces_arrive_with_their_characters() -> None:
    session = FORMATS["pythonic"].open((SAY,))
    session.push("[say(text='")

    assert session.push("One ") == [CallArguments('"One ')]
    assert session.push("\\") == []
    assert session.push('n"') == [CallArguments('\\n\\"')]
