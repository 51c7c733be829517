"""Contract suite for tool parsers, as a test class.

::

    class TestMyParser(ToolParserContract):
        answers = (('<call>now{}</call>', "", [("now", "{}")]),)

        @pytest.fixture(scope="class")
        @classmethod
        def tool_parser(cls):
            return MyToolParser()

``answers`` are model outputs with the expected result: content, and (name, arguments) of the calls. The functions are
those of :data:`enginehouse_testkit.contract.parser_driver.TOOLS`. Without any, the suite uses calls described by the
parser's own constraint.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from typing import ClassVar

import pytest

from enginehouse.contract.composition import read_composition
from enginehouse.contract.errors import RequestError
from enginehouse.contract.parsers import CallArguments, ChatFormat, ToolFormat, ToolParser, ToolSession
from enginehouse.contract.types import Message, ToolCall
from enginehouse_testkit.contract.form import (
    FormContract,
    loader_problem,
    members_problem,
    problem_of,
    result_problem,
)
from enginehouse_testkit.contract.parser_driver import TOOLS, Said, cuts, said_by, texts_of

__all__ = ["ToolParserContract"]

_TEMPLATES = (
    "",
    "{{ messages }}",
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}",
    "{{ '<tool_call>' }} ] [ \x00",
)
_MAX_PUSH_S, _NUM_PUSHES = 0.05, 10
_MORE, _NUM_MORE = " and more", 20
_PLAIN = ("Paris.", "  indented\n\ncode  ", "a < b and b > c", "ends with <", "Größe 🙂", "", " ")


class ToolParserContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.parsers.ToolParser`.

    Attributes:
        model: the model that the parser is bound to.
        answers: model outputs with the expected results.
    """

    model: ClassVar[ChatFormat] = ChatFormat("")
    answers: ClassVar[Sequence[tuple[str, str, list[tuple[str, str]]]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, tool_parser: ToolParser) -> str:
        """Reason for which the loader refuses the tool parser, or what its format lacks."""
        return loader_problem("tool_parsers", tool_parser) or problem_of(lambda: cls._problem_of_format(tool_parser))

    @classmethod
    def _problem_of_format(cls, parser: ToolParser) -> str:
        """Return what the bound parser or its session lacks."""
        if problem := result_problem(ToolParser.match, parser.match(cls.model)):
            return problem
        bound = parser.bind(cls.model)
        if problem := members_problem("bind", ToolFormat, bound):
            return problem
        session = bound.open(TOOLS)
        return members_problem("open", ToolSession, session) or cls._problem_of_session(session)

    @staticmethod
    def _problem_of_session(session: ToolSession) -> str:
        """Return what is wrong with the results of a session, or with its time for a short text."""
        fastest_s = math.inf
        for _ in range(_NUM_PUSHES):  # the machine may be busy: one fast call is enough
            begin_s = time.perf_counter()
            found = session.push(_PLAIN[0])
            fastest_s = min(fastest_s, time.perf_counter() - begin_s)
            if problem := result_problem(ToolSession.push, found):
                return problem
            if fastest_s <= _MAX_PUSH_S:
                break
        if problem := result_problem(ToolSession.flush, session.flush(is_cut=False)):
            return problem
        if fastest_s > _MAX_PUSH_S:
            took = f"push of a short text took {1000 * fastest_s:.0f} ms, the fastest of {_NUM_PUSHES} calls"
            return f"{took}; its stream waits for it, and the server warns above {1000 * _MAX_PUSH_S:.0f} ms"
        return ""

    @pytest.fixture(scope="class")
    @classmethod
    def tool_format(cls, tool_parser: ToolParser) -> ToolFormat:
        """The parser, bound."""
        return tool_parser.bind(cls.model)

    @pytest.fixture(scope="class")
    @classmethod
    def enforced(cls, form: str, tool_format: ToolFormat) -> list[str]:
        """Calls in the form that the format's own constraint describes."""
        if form:
            return []
        constraint = tool_format.constraint(TOOLS, parallel=True)
        texts = texts_of(read_composition(constraint.text)) if constraint.kind == "composition" else []
        return texts or [text for text, _, calls in cls.answers if calls]

    def test_match_is_a_share_for_any_template(self, tool_parser: ToolParser) -> None:
        """The score is valid for foreign templates."""
        for template in _TEMPLATES:
            assert 0.0 <= tool_parser.match(ChatFormat(template, {"<tool_call>": 1})) <= 1.0

    def test_answers_say_what_they_say_however_cut(self, tool_format: ToolFormat) -> None:
        """The author's own corpus; core handles white space around calls."""
        for text, content, calls in self.answers:
            for pieces in ([text], *cuts(text)):
                said = said_by(tool_format.open(TOOLS), pieces)
                assert (said.content.strip(), said.calls) == (content.strip(), calls), f"pushed in pieces: {pieces}"

    def test_enforced_calls_are_read_as_calls(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """The session parses every text that ``constraint`` enforces, however it is split."""
        if not enforced:
            pytest.skip("the constraint is not made of JSON Schemas: list some texts with calls in answers")
        names = {tool.name for tool in TOOLS}
        for text in enforced:
            expected = said_by(tool_format.open(TOOLS), [text])
            assert expected.calls, f"{text!r} is not read as a call"
            assert {name for name, _ in expected.calls} <= names
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in expected.calls)
            for pieces in cuts(text):
                assert said_by(tool_format.open(TOOLS), pieces) == expected, f"pushed in pieces: {pieces}"

    def test_markers_are_never_shown(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """No marker shows, however the call is split and wherever a limit ends it."""
        for text in enforced:
            for end in range(len(text) + 1):
                for is_cut in (False, True):
                    said = said_by(tool_format.open(TOOLS), [text[:end]], is_cut)
                    _assert_hidden(said, tool_format, f"{text[:end]!r}{' (cut by a limit)' * is_cut}")

    def test_calls_of_unknown_functions_are_text(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """The text does not contain the tags."""
        for text in enforced:
            said = said_by(tool_format.open(()), [text])
            assert said.calls == [], f"no tool was given, but {text!r} was read as a call"
            _assert_hidden(said, tool_format, f"{text!r}, without tools,")

    def test_text_without_calls_stays_as_it_is(self, tool_format: ToolFormat) -> None:
        """Also when pushed character by character."""
        for text in _PLAIN:
            for pieces in ([text], list(text)):
                assert said_by(tool_format.open(TOOLS), [piece for piece in pieces if piece]) == Said(content=text)

    def test_plain_text_is_not_held_back(self, tool_format: ToolFormat) -> None:
        """Only possible markup is held back."""
        session = tool_format.open(TOOLS)
        shown = ""
        for number in range(20):
            shown += "".join(getattr(part, "text", "") for part in session.push(f" word{number}"))

        assert "word18" in shown

    def test_arguments_stream(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """A long text argument is given in pieces, before its end has arrived."""
        text = _with_long_argument([*enforced, *(text for text, _, calls in self.answers if calls)], self._arguments())
        if text is None:
            pytest.skip("no call has a text argument without escapes: list say with the text 'hello' in answers")
        beginning = text[: text.rindex(_MORE) + len(_MORE)]  # the end of the argument has not arrived
        session = tool_format.open(TOOLS)
        parts = [part for start in range(0, len(beginning), 4) for part in session.push(beginning[start : start + 4])]

        given = "".join(part.text for part in parts if isinstance(part, CallArguments))
        what = f"of {text!r}, pushed in fours, the argument of which {_NUM_MORE} times {_MORE!r} had arrived"
        assert given.count(_MORE) > _NUM_MORE // 2, f"{what} was given as {given!r}: give a text while it arrives"

    def _arguments(self) -> list[str]:
        """Return the texts that are arguments of calls of the suite, longest first."""
        values = [value for _, _, calls in self.answers for _, arguments in calls for value in _texts_in(arguments)]
        return ["quotes", *sorted(values, key=len, reverse=True)]

    def test_anything_is_the_same_however_cut(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """Markup in wrong positions never raises."""
        chance = random.Random(0)
        words = [*tool_format.markers, *'{}[]()":,\\', "now", '{"name": "now"}', "\n", " ", "x", "🙂"]
        words += [piece for text in enforced[:3] for piece in (text[: len(text) // 2], text[len(text) // 2 :])]
        for _ in range(60):
            tokens = chance.choices(words, k=chance.randrange(1, 12))
            whole = said_by(tool_format.open(TOOLS), ["".join(tokens)])
            assert said_by(tool_format.open(TOOLS), tokens) == whole, tokens
            assert said_by(tool_format.open(TOOLS), list("".join(tokens))) == whole, tokens

    def test_sessions_do_not_touch_each_other(self, tool_format: ToolFormat, enforced: list[str]) -> None:
        """Two choices of one request are independent."""
        for text in enforced[:2]:
            one, other = tool_format.open(TOOLS), tool_format.open(TOOLS)
            one.push(text[: len(text) // 2])
            assert said_by(other, [text]) == said_by(tool_format.open(TOOLS), [text])

    def test_chats_with_damaged_calls_are_prepared(self, tool_format: ToolFormat) -> None:
        """Clients repeat malformed calls that models wrote."""
        for arguments in ("{}", '{"text": "cut', "", "[1]"):
            calls = (ToolCall(id="a", name="say", arguments=arguments),)
            chat = (
                Message(role="user", content="hi"),
                Message(role="assistant", content="", tool_calls=calls),
                Message(role="tool", content="done", tool_call_id="a"),
            )
            prepared = tool_format.prepare(chat, TOOLS)
            assert prepared.messages
            assert all(isinstance(message.content, str) for message in prepared.messages)

    def test_constraints_are_made_or_refused(self, tool_format: ToolFormat) -> None:
        """One call and several; an inexpressible constraint is a RequestError."""
        for parallel in (False, True):
            for tools in (TOOLS, TOOLS[2:]):
                try:
                    assert tool_format.constraint(tools, parallel).text
                except RequestError as error:
                    assert error.message


def _texts_in(arguments: str) -> list[str]:
    """Return the values of a call's arguments that are texts."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return []
    return [value for value in values.values() if isinstance(value, str) and value] if isinstance(values, dict) else []


def _with_long_argument(texts: Sequence[str], values: Sequence[str]) -> str | None:
    """Return the longest text that holds one of these arguments, with a longer one in its place."""
    for value in values:
        for text in sorted(texts, key=len, reverse=True):
            if value in text:
                return text.replace(value, value + _MORE * _NUM_MORE)
    return None


def _assert_hidden(said: Said, tool_format: ToolFormat, what: str) -> None:
    """Assert that no marker is in the text of an answer."""
    shown = [marker for marker in tool_format.markers if marker in said.content]
    assert not shown, f"of {what} the marker {shown[0]!r} is shown: the text is {said.content!r}"
