"""Every parser keeps the contract of its kind."""

from __future__ import annotations

from typing import ClassVar

import pytest

from enginehouse.contract.parsers import ChatFormat, ReasoningParser, ToolParser
from enginehouse_parsers.llama import LlamaToolParser
from enginehouse_parsers.mistral import MistralToolParser
from enginehouse_parsers.pythonic import PythonicToolParser
from enginehouse_parsers.tagged_json import DefaultToolParser, HermesToolParser
from enginehouse_parsers.think import ThinkParser
from enginehouse_testkit.reasoning_parser_contract import ReasoningParserContract
from enginehouse_testkit.tool_parser_contract import ToolParserContract

LAMP = ("set_lamp", '{"on": true, "level": 3}')


class ToolContract(ToolParserContract):
    plugin: ClassVar[type[ToolParser]]

    @pytest.fixture(scope="class")
    @classmethod
    def tool_parser(cls) -> ToolParser:
        return cls.plugin()


class TestHermes(ToolContract):
    plugin = HermesToolParser


class TestDefault(ToolContract):
    plugin = DefaultToolParser


class TestLlama(ToolContract):
    plugin = LlamaToolParser


class TestMistral(ToolContract):
    plugin = MistralToolParser
    model = ChatFormat("[TOOL_CALLS]")


class TestMistralNamed(ToolContract):
    plugin = MistralToolParser
    model = ChatFormat("[TOOL_CALLS]{{ name }}[ARGS]")


class TestPythonic(ToolContract):
    plugin = PythonicToolParser
    answers = (
        ("[set_lamp(on=True, level=3)]", "", [LAMP]),
        ("[now(), say(text='hi')]", "", [("now", "{}"), ("say", '{"text": "hi"}')]),
    )


class ReasoningContract(ReasoningParserContract):
    @pytest.fixture(scope="class")
    @classmethod
    def reasoning_parser(cls) -> ReasoningParser:
        return ThinkParser()


class TestThink(ReasoningContract):
    model = ChatFormat("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}")


class TestThinkWithOtherTags(ReasoningContract):
    model = ChatFormat("{{ c.split('[/THINK]') }}")
