"""What holds for every format: white space around calls, their number, and parsers that fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from enginehouse.contract.errors import GenerationFailed, PluginFailed
from enginehouse.contract.parsers import (
    AnswerPart,
    AnswerText,
    CallArguments,
    CallFinished,
    CallStarted,
    PreparedChat,
    ReasoningText,
)
from enginehouse.pipeline.answer_parser import AnswerParsing

WRONG_ORDER: dict[str, list[AnswerPart]] = {
    "end": [CallFinished()],
    "arguments": [AnswerText("so"), CallArguments("{}")],
    "text": [CallStarted("f"), AnswerText("so"), CallFinished()],
    "two": [CallStarted("f"), CallStarted("g")],
}
"""Text to parts that form no call."""


class Bracketed:
    """A format for tests: ``(name)`` is a call; ``!`` fails, and ``<`` is held back."""

    markers: tuple[str, ...] = ()

    def open(self, tools):
        return self

    def push(self, text: str) -> Sequence[AnswerPart]:
        if "!" in text:
            raise RuntimeError("on purpose")
        if text == "(open":
            return [CallStarted("f"), CallArguments("{")]
        if text in WRONG_ORDER:
            return WRONG_ORDER[text]
        if text == "<":
            return []
        if text == "nothing":
            return [AnswerText("")]
        if text.startswith("("):
            return [CallStarted(text[1:-1]), CallArguments("{}"), CallFinished()]
        return [AnswerText(text)]

    def flush(self, is_cut: bool) -> Sequence[AnswerPart]:
        return []

    def prepare(self, messages, tools) -> PreparedChat:
        return PreparedChat(messages, tools)


class Starred:
    """Reasoning for tests: the text up to a star; ``!`` fails."""

    start, end, has_switch = "", "*", False
    is_over = False

    def open(self, is_open: bool):
        return Starred()

    def push(self, text: str) -> Sequence[AnswerPart]:
        if "!" in text:
            raise RuntimeError("on purpose")
        if self.is_over:
            return [AnswerText(text)]
        self.is_over = text.endswith("*")
        return [ReasoningText(text.removesuffix("*"))]

    def flush(self, is_cut: bool) -> Sequence[AnswerPart]:
        return []


def parts(parsing: AnswerParsing, *texts: str) -> list[AnswerPart]:
    parser = parsing.open()
    assert parser is not None
    return [part for text in texts for part in parser.push(text)] + list(parser.flush())


def shown(parsing: AnswerParsing, *texts: str) -> str:
    """Text as it is, calls in parentheses, reasoning in stars."""
    written = ""
    for part in parts(parsing, *texts):
        match part:
            case AnswerText(text):
                written += text
            case ReasoningText(text):
                written += f"*{text}*"
            case CallStarted(name):
                written += f"({name}"
            case CallArguments(text):
                written += text
            case CallFinished():
                written += ")"
    return written


CALLS = AnswerParsing(tool_format=Bracketed())  # type: ignore[arg-type]


def test_without_parsers_there_is_nothing_to_do() -> None:
    assert AnswerParsing().open() is None


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("Hello ", "world \n"), "Hello world \n"),
        (("  Hello",), "  Hello"),
        (("\n\n", "(f)", "\n"), "(f{})"),
        (("Wait.", " \n", "(f)", "\n\n", "(g)", " "), "Wait.(f{})(g{})"),
        (("(f)", "\n Done.", "\n"), "(f{})Done."),
        (("Wait.\n", "(f)", "\n", "Done."), "Wait.(f{})\nDone."),
        (("  ",), "  "),
        ((), ""),
    ],
)
def test_white_space_around_calls_is_dropped(texts: tuple[str, ...], expected: str) -> None:
    assert shown(CALLS, *texts) == expected


def test_further_calls_are_dropped_with_their_arguments() -> None:
    limited = AnswerParsing(tool_format=Bracketed(), max_calls=1)  # type: ignore[arg-type]

    assert shown(limited, "a", "(f)", "(g)", "(h)") == "a(f{})"


def test_a_tool_parser_that_fails_leaves_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert shown(CALLS, "Hello ", "wor!ld", " (f)") == "Hello wor!ld (f)"
    assert "test_answer_parser" in caplog.text and "on purpose" in caplog.text


def test_a_tool_parser_that_fails_shows_the_text_that_it_held_back() -> None:
    assert shown(CALLS, "Hello", " ", "<", "!", "rest") == "Hello <!rest"
    assert shown(CALLS, "(f)", "<", "!", "rest") == "(f{})<!rest"


@pytest.mark.parametrize("texts", [("(open", "!", "rest"), ("(open",)], ids=["push", "flush"])
def test_a_tool_parser_that_fails_inside_a_call_fails_the_request_by_name(texts: tuple[str, ...]) -> None:
    """Half a call would be taken for a whole one."""
    with pytest.raises(PluginFailed, match="test_answer_parser"):
        shown(CALLS, *texts)

    limited = AnswerParsing(tool_format=Bracketed(), max_calls=1)  # type: ignore[arg-type]
    assert shown(limited, "(f)", *texts).startswith("(f{})"), "a call beyond the limit is not shown"


def test_an_empty_text_is_not_shown() -> None:
    assert shown(CALLS, "a", "nothing", "(f)") == "a(f{})"


@pytest.mark.parametrize("text", WRONG_ORDER)
def test_parts_that_form_no_call_are_a_failure(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert shown(CALLS, text, "rest") == f"{text}rest"
    assert ": push gave" in caplog.text and "a call" in caplog.text


def test_a_tool_parser_that_cannot_open_leaves_text() -> None:
    class Broken(Bracketed):
        def open(self, tools):
            raise RuntimeError("on purpose")

    assert shown(AnswerParsing(tool_format=Broken()), "(f)", " ") == "(f) "  # type: ignore[arg-type]


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    parsing = AnswerParsing(reasoning=Starred(), tool_format=Bracketed())  # type: ignore[arg-type]

    assert shown(parsing, "(f)", "why*", "(g)") == "*(f)**why*(g{})"


def test_a_reasoning_parser_that_fails_fails_the_request_by_name() -> None:
    with pytest.raises(GenerationFailed, match="test_answer_parser") as caught:
        shown(AnswerParsing(reasoning=Starred()), "a", "!")  # type: ignore[arg-type]
    assert "test_answer_parser" in (caught.value.plugin or "")
