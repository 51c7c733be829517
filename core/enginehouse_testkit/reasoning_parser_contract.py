"""The contract of a reasoning parser as a test class.

::

    class TestMyParser(ReasoningParserContract):
        model = ChatFormat("{{ '<plan>' }}")

        @pytest.fixture(scope="class")
        @classmethod
        def reasoning_parser(cls):
            return MyReasoningParser()
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from enginehouse.contract.parsers import ChatFormat, ReasoningFormat, ReasoningParser
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.registration import Registration
from enginehouse_testkit.contract.parser_driver import Said, cuts, said_by

__all__ = ["ReasoningParserContract"]


class ReasoningParserContract:
    """Every promise of :class:`enginehouse.contract.parsers.ReasoningParser` that can be tested from outside.

    Attributes:
        model: a model that the parser knows.
    """

    model: ClassVar[ChatFormat] = ChatFormat("")

    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_format(cls, reasoning_parser: ReasoningParser) -> ReasoningFormat:
        """The parser, bound."""
        return reasoning_parser.bind(cls.model)

    def test_parser_is_accepted_by_the_loader(self, reasoning_parser: ReasoningParser) -> None:
        """Complete and of a known version."""
        Registration().register(KINDS["reasoning_parsers"], "kit", reasoning_parser)

        assert isinstance(reasoning_parser, ReasoningParser)

    def test_match_is_a_share_for_any_template(self, reasoning_parser: ReasoningParser) -> None:
        """Nothing where nothing points to reasoning."""
        for template in ("", "{{ messages }}", "<think> {% </think>", "\x00"):
            assert 0.0 <= reasoning_parser.match(ChatFormat(template, {"<think>": 1})) <= 1.0
        assert reasoning_parser.match(ChatFormat("{{ messages[0].content }}")) < 0.5

    def test_markers_differ(self, reasoning_format: ReasoningFormat) -> None:
        """Neither is empty."""
        assert reasoning_format.start
        assert reasoning_format.end
        assert reasoning_format.start != reasoning_format.end

    def test_reasoning_is_told_from_the_answer_however_cut(self, reasoning_format: ReasoningFormat) -> None:
        """Opened by the model or by the prompt."""
        start, end = reasoning_format.start, reasoning_format.end
        expected = Said(reasoning="plan < A", content="Answer 7")
        for is_open, text in ((False, f"{start}plan < A{end}Answer 7"), (True, f"plan < A{end}Answer 7")):
            for pieces in ([text], *cuts(text)):
                assert said_by(reasoning_format.open(is_open), pieces) == expected, pieces

    def test_reasoning_that_never_ends_is_reasoning(self, reasoning_format: ReasoningFormat) -> None:
        """A limit cut it; no piece of the closing marker shows, but for a single character, which may be text."""
        text = f"plan A{reasoning_format.end}"
        for end in (len("plan A"), *range(len("plan A") + 2, len(text))):
            said = said_by(reasoning_format.open(True), [text[:end]], is_cut=True)
            assert (said.content, said.reasoning.rstrip()) == ("", "plan A")

    def test_answers_without_reasoning_stay_as_they_are(self, reasoning_format: ReasoningFormat) -> None:
        """Character by character as well."""
        for text in ("Paris.", "\n\n indented", "a < b", "Größe 🙂", ""):
            for pieces in ([text], list(text)):
                assert said_by(reasoning_format.open(False), pieces) == Said(content=text)

    def test_markers_are_never_shown(self, reasoning_format: ReasoningFormat) -> None:
        """Wherever a limit ends the text."""
        start, end = reasoning_format.start, reasoning_format.end
        text = f"{start}plan{end}Answer"
        for place in range(len(text) + 1):
            said = said_by(reasoning_format.open(False), list(text[:place]), is_cut=True)
            assert not any(marker in said.content + said.reasoning for marker in (start, end))

    def test_anything_is_the_same_however_cut(self, reasoning_format: ReasoningFormat) -> None:
        """Markers in the wrong places never raise."""
        chance = random.Random(0)
        words = [reasoning_format.start, reasoning_format.end, "<", "/", ">", "\n", " ", "a", "🙂"]
        for _ in range(80):
            tokens = chance.choices(words, k=chance.randrange(1, 10))
            for is_open in (False, True):
                whole = said_by(reasoning_format.open(is_open), ["".join(tokens)])
                assert said_by(reasoning_format.open(is_open), tokens) == whole, tokens
                assert said_by(reasoning_format.open(is_open), list("".join(tokens))) == whole, tokens

    def test_prompts_say_whether_reasoning_is_open(self, reasoning_format: ReasoningFormat) -> None:
        """At their very end only."""
        start, end = reasoning_format.start, reasoning_format.end

        assert reasoning_format.is_open(f"user: hi\nassistant:{start}")
        for prompt in ("", f"what is {start}?\nassistant:", f"{start}\n\n{end}\n\n"):
            assert not reasoning_format.is_open(prompt)

    def test_variables_are_plain(self, reasoning_format: ReasoningFormat) -> None:
        """As usual means nothing is set; a switch that exists is set both ways."""
        assert reasoning_format.variables(None, None) == {}
        for enabled in (True, False):
            found = reasoning_format.variables(enabled, None)
            assert bool(found) == reasoning_format.has_switch
            assert all(isinstance(name, str) for name in found)
