"""Messages with headers: the channels of gpt-oss and the recipients of Muse, as reasoning, calls and answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.types import Message, ToolCall
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_parsers.harmony import HarmonyReasoningParser, RecipientsReasoningParser

from .answers import FORMATS, TOOLS

Check = Callable[[AnswerParsing, str], dict[str, Any]]

REASONING = HarmonyReasoningParser().bind(ChatFormat(""))
RECIPIENTS = RecipientsReasoningParser().bind(ChatFormat(""))
LAMP = ("set_lamp", '{"on": true, "level": 3}')


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("<|channel|>final<|message|>Hi", "Hi", "", []),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", "Hm.", []),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.set_lamp "
            '<|constrain|>json<|message|>{"on": true, "level": 3}<|call|>',
            "",
            "Hm.",
            [LAMP],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.set_lamp<|channel|>commentary json"
            '<|message|>{"on": true, "level": 3}',
            "",
            "Hm.",
            [LAMP],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.now<|message|>{}",
            "I look.",
            "",
            [("now", "{}")],
        ),
        (" to=functions.now<|channel|>commentary json<|message|>{}", "", "", [("now", "{}")]),
        ("<|channel|>commentary to=functions.now<|message|>", "", "", [("now", "{}")]),
        ("no channel at all", "no channel at all", "", []),
        ("to=be or not", "to=be or not", "", []),
        # Without tools the control token before the word is not shown.
        ("<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>Hi", "Hi", "Hm.", []),
        ("<|channel|>final<|message|>Hi<|end|>assistant", "Hiassistant", "", []),
        ("<|channel|>" + "a" * 400, "a" * 400, "", []),  # longer than a header is
        ("<|channel|>" + "a" * 285 + "<|message|>b", "b", "", []),
        ("Hm.<|channel|><|channel|>" + "a " * 200 + "<|message|>b", "Hm." + "a " * 200 + "b", "", []),
        ("<|channel|>analysis<|message|>cut", "", "cut", []),
    ],
)
def test_channels(same_however_cut: Check, text: str, content: str, reasoning: str, calls: Any) -> None:
    parsing = AnswerParsing(reasoning=REASONING, tool_format=FORMATS["harmony"], tools=TOOLS)

    assert same_however_cut(parsing, text) == {"content": content, "reasoning": reasoning, "calls": calls}


NEXT = "<|eom|><|start|>assistant"
SAY = '<atem:function_calls>\n<atem:invoke name="say">\n<atem:parameter name="text">hi</atem:parameter>\n'
SAY += "</atem:invoke>\n</atem:function_calls>"
SAID = ("say", '{"text": "hi"}')


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (" to=user<|message|>Hi<|eot|>", "Hi", "", []),
        (f" to=self<|message|>Hm.{NEXT} to=user<|message|>Hi", "Hi", "Hm.", []),
        (" to=self<|message|>Hm.<|eom|>assistant to=user<|message|>Hi", "Hi", "Hm.", []),
        (f" to=self<|message|>Hm.{NEXT} to=say<|message|>{SAY}", "", "Hm.", [SAID]),
        (f" to=say<|message|>{SAY}{NEXT} to=say<|message|>{SAY}<|eot|>", "", "", [SAID, SAID]),
        (f" to=user<|message|>I look.{NEXT} to=say<|message|>{SAY}", "I look.", "", [SAID]),
        (" to=self<|message|>cut", "", "cut", []),
        ("no header at all", "no header at all", "", []),
    ],
)
def test_recipients(same_however_cut: Check, text: str, content: str, reasoning: str, calls: Any) -> None:
    parsing = AnswerParsing(reasoning=RECIPIENTS, tool_format=FORMATS["atem"], tools=TOOLS)

    assert same_however_cut(parsing, text) == {"content": content, "reasoning": reasoning, "calls": calls}


def test_a_header_of_calls_names_the_function() -> None:
    """As the model writes it: once in the header, once in the call."""
    call = ToolCall(id="a", name="now", arguments='{"a": 1}')
    prepared = evolve(FORMATS["atem"], calls_as_text=True).prepare(
        (Message(role="assistant", content="", tool_calls=(call,)),), ()
    )

    assert prepared.messages[0].content == (
        ' to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    assert FORMATS["atem"].syntax.first_marker == "<atem:function_calls>"


def test_enforced_calls_are_read_without_the_reasoning_session(same_however_cut: Check) -> None:
    parsing = AnswerParsing(tool_format=FORMATS["harmony"], tools=TOOLS)
    text = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"

    assert same_however_cut(parsing, text)["calls"] == [("now", "{}")]


def test_earlier_reasoning_before_a_call_is_the_content() -> None:
    call = ToolCall(id="a", name="now", arguments="{}")
    turn = Message(role="assistant", content="", reasoning="Hm.", tool_calls=(call,))

    assert FORMATS["harmony"].prepare((turn,), ()).messages[0].content == "Hm."


def test_effort_is_low_where_reasoning_cannot_be_switched_off() -> None:
    assert REASONING.variables(False, None) == {"reasoning_effort": "low"}
    assert REASONING.variables(None, "high") == {"reasoning_effort": "high"}
    assert REASONING.variables(None, None) == {}
    assert RECIPIENTS.variables(None, "high") == {"reasoning_strength": "high"}
