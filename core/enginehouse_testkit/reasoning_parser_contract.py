"""Contract suite for reasoning parsers, as a test class.

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
from enginehouse_testkit.contract.form import FormContract, loader_problem, members_problem, problem_of
from enginehouse_testkit.contract.parser_driver import Said, cuts, said_by

__all__ = ["ReasoningParserContract"]


class ReasoningParserContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.parsers.ReasoningParser`.

    Attributes:
        model: a model that the parser supports.
    """

    model: ClassVar[ChatFormat] = ChatFormat("")

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, reasoning_parser: ReasoningParser) -> str:
        """Reason for which the loader refuses the reasoning parser."""
        return loader_problem("reasoning_parsers", reasoning_parser) or problem_of(
            lambda: members_problem("bind", ReasoningFormat, reasoning_parser.bind(cls.model))
        )

    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_format(cls, reasoning_parser: ReasoningParser) -> ReasoningFormat:
        """The parser, bound."""
        return reasoning_parser.bind(cls.model)

    def test_match_is_a_share_for_any_template(self, reasoning_parser: ReasoningParser) -> None:
        """The score is between 0 and 1, and low for templates without signs of reasoning."""
        for template in ("", "{{ messages }}", "<think> {% </think>", "\x00"):
            assert 0.0 <= reasoning_parser.match(ChatFormat(template, {"<think>": 1})) <= 1.0
        assert reasoning_parser.match(ChatFormat("{{ messages[0].content }}")) < 0.5

    def test_markers_differ(self, reasoning_format: ReasoningFormat) -> None:
        """Markers are not empty."""
        assert reasoning_format.start
        assert reasoning_format.end
        assert reasoning_format.start != reasoning_format.end

    def test_reasoning_is_told_from_the_answer_however_cut(self, reasoning_format: ReasoningFormat) -> None:
        """Reasoning may be opened by the model or by the prompt."""
        start, end = reasoning_format.start, reasoning_format.end
        expected = Said(reasoning="plan < A", content="Answer 7")
        for is_open, text in ((False, f"{start}plan < A{end}Answer 7"), (True, f"plan < A{end}Answer 7")):
            for pieces in ([text], *cuts(text)):
                assert said_by(reasoning_format.open(is_open), pieces) == expected, pieces

    def test_reasoning_that_never_ends_is_reasoning(self, reasoning_format: ReasoningFormat) -> None:
        """If a limit cut it, no part of the closing marker shows, except a single character, which may be text."""
        text = f"plan A{reasoning_format.end}"
        for end in (len("plan A"), *range(len("plan A") + 2, len(text))):
            said = said_by(reasoning_format.open(True), [text[:end]], is_cut=True)
            assert (said.content, said.reasoning.rstrip()) == ("", "plan A"), (
                f"an answer that a limit cut after {text[:end]!r} has the content {said.content!r} and the reasoning "
                f"{said.reasoning!r}: flush(is_cut=True) must drop an unfinished marker"
            )

    def test_answers_without_reasoning_stay_as_they_are(self, reasoning_format: ReasoningFormat) -> None:
        """Also when pushed character by character."""
        for text in ("Paris.", "\n\n indented", "a < b", "Größe 🙂", ""):
            for pieces in ([text], list(text)):
                assert said_by(reasoning_format.open(False), pieces) == Said(content=text)

    def test_markers_are_never_shown(self, reasoning_format: ReasoningFormat) -> None:
        """No marker shows wherever a limit ends the text."""
        start, end = reasoning_format.start, reasoning_format.end
        text = f"{start}plan{end}Answer"
        for place in range(len(text) + 1):
            said = said_by(reasoning_format.open(False), list(text[:place]), is_cut=True)
            shown = [marker for marker in (start, end) if marker in said.content + said.reasoning]
            assert not shown, f"of {text[:place]!r}, cut by a limit, the marker {shown[0]!r} is shown: {said}"

    def test_anything_is_the_same_however_cut(self, reasoning_format: ReasoningFormat) -> None:
        """Markers in wrong positions never raise."""
        chance = random.Random(0)
        words = [reasoning_format.start, reasoning_format.end, "<", "/", ">", "\n", " ", "a", "🙂"]
        for _ in range(80):
            tokens = chance.choices(words, k=chance.randrange(1, 10))
            for is_open in (False, True):
                whole = said_by(reasoning_format.open(is_open), ["".join(tokens)])
                assert said_by(reasoning_format.open(is_open), tokens) == whole, tokens
                assert said_by(reasoning_format.open(is_open), list("".join(tokens))) == whole, tokens

    def test_prompts_say_whether_reasoning_is_open(self, reasoning_format: ReasoningFormat) -> None:
        """Only a marker at the very end of the prompt opens reasoning."""
        start, end = reasoning_format.start, reasoning_format.end

        assert reasoning_format.is_open(f"user: hi\nassistant:{start}")
        for prompt in ("", f"what is {start}?\nassistant:", f"{start}\n\n{end}\n\n"):
            assert not reasoning_format.is_open(prompt)

    def test_variables_are_plain(self, reasoning_format: ReasoningFormat) -> None:
        """None sets no variable; an existing switch is set in both directions."""
        assert reasoning_format.variables(None, None) == {}
        on, off = reasoning_format.variables(True, None), reasoning_format.variables(False, None)
        assert bool(on) == reasoning_format.has_switch
        assert off or not reasoning_format.has_switch
        assert all(isinstance(name, str) for name in (*on, *off))
