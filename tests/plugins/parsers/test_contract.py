"""Every parser keeps the contract of its kind."""

from __future__ import annotations

import pytest

from enginehouse.contract.parsers import ChatFormat, ReasoningParser, ToolParser
from enginehouse_parsers.harmony import HarmonyReasoningParser, RecipientsReasoningParser
from enginehouse_parsers.think import ThinkParser
from enginehouse_testkit.reasoning_parser_contract import ReasoningParserContract
from enginehouse_testkit.tool_parser_contract import ToolParserContract

from .answers import DRAWN, PARSERS

LAMP = ("set_lamp", '{"on": true, "level": 3}')
SAID = ("say", '{"text": "hi"}')
ANSWERS = {
    "pythonic": (
        ("[set_lamp(on=True, level=3)]", "", [LAMP]),
        ("[now(), say(text='hi')]", "", [("now", "{}"), SAID]),
    ),
    "qwen3-coder": (
        ("<tool_call>\n<function=say>\n<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>", "", [SAID]),
    ),
}


@pytest.mark.parametrize("tool_parser", [PARSERS[name] for name in DRAWN], ids=DRAWN, scope="class")
class TestToolParsers(ToolParserContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _own_answers(cls, tool_parser: ToolParser) -> None:
        cls.answers = ANSWERS.get(tool_parser.name, ())


class ReasoningContract(ReasoningParserContract):
    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_parser(cls) -> ReasoningParser:
        return ThinkParser()


class TestThink(ReasoningContract):
    model = ChatFormat("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}")


class TestThinkWithOtherTags(ReasoningContract):
    model = ChatFormat("{{ c.split('[/THINK]') }}")


class TestRecipients(ReasoningParserContract):
    model = ChatFormat("' to=self<|message|>'")

    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_parser(cls) -> ReasoningParser:
        return RecipientsReasoningParser()


class TestHarmony(ReasoningParserContract):
    model = ChatFormat("<|channel|>analysis<|message|>")

    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_parser(cls) -> ReasoningParser:
        return HarmonyReasoningParser()
